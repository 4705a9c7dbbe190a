"""Teachers that are real servers: what they say of a sample is what their model's forward pass says."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from april.data.arithmetic import ALPHABET
from april.data.tokenizer import Tokenizer
from april.workers.engines.sglang.server import ServerSettings
from april.workers.scoring import LeasedTask, Scoring
from april.workers.teachers.check import check_teacher
from tests.support.attached_servers import SGLANG_PYTHON, VLLM_PYTHON, PlainVLLM, serve
from tests.support.reward_scores import collect, grant_of, task_of
from tests.support.teacher_servers import with_teacher

TOP_K = 5
SERVERS = {
    "sglang": (ServerSettings, SGLANG_PYTHON, {"skip_tokenizer_init": False}, ("sglang",)),
    "vllm": (PlainVLLM, VLLM_PYTHON, {}, ("vllm", "openai")),
}
"""Servers as their makers start them, with their own tokenisers, and the kinds of teacher that ask them."""


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in SERVERS])
def teachers(request, config_file, policy_folder, tmp_path):
    """A configuration for each kind of teacher that a server is."""
    settings, python, options, kinds = SERVERS[request.param]
    started = settings(python, policy_folder, tmp_path / "server.log", slots=16, context_tokens=256, options=options)
    for server in serve(started):
        yield [with_teacher(config_file, kind=kind, url=server.url, path=policy_folder, top_k=TOP_K) for kind in kinds]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_top_k_of_a_real_server_are_those_of_its_model(teachers, policy_folder):
    """From the check before a run to the score. The responses have all ids of the policy, the last one, too, and follow
    one prompt, which is in the server's prefix cache then."""
    tokenizer, model = Tokenizer(policy_folder), AutoModelForCausalLM.from_pretrained(policy_folder).eval()
    prompt = tokenizer.encode_prompt("05*3+60=")
    responses = list(map(tokenizer.encode_prompt, (ALPHABET, ALPHABET[::-1] + "#1", "#", "," * 200)))
    for config in teachers:
        check_teacher(config, "big", config.teacher["big"])
        for response, columns in zip(responses, scored(config, tokenizer, prompt, responses), strict=True):
            with torch.inference_mode():
                logits = model(torch.from_numpy(np.concatenate([prompt, response])[None]).long()).logits[0]
            expected = logits.log_softmax(-1).numpy()[len(prompt) - 1 : -1]
            ids, told = np.moveaxis(columns["big/top_k"].reshape(-1, TOP_K, 2), 2, 0)
            largest = -np.sort(-expected, 1)[:, :TOP_K]
            for found, right in (
                (columns["big"], expected[np.arange(len(response)), response]),
                (told, np.take_along_axis(expected, ids.astype(int), 1)),
                (told, largest),
            ):
                np.testing.assert_allclose(found, right, atol=1e-3)


def scored(config, tokenizer, prompt, responses):
    """Token scores of each response, by name, as a scorer has them."""
    scoring, task = Scoring(config, tokenizer, start_now=False), replace(task_of("exact"), teacher="big")
    for number, response in enumerate(responses):
        scoring.submit(LeasedTask(grant_of(number), task, [prompt, response]), "stop")
    scores = collect(scoring, len(responses))
    scoring.close()
    columns = [scores[number].token_scores for number in range(len(responses))]
    return [{name: np.frombuffer(data, np.float32) for name, data in each.items()} for each in columns]
