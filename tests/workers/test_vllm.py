"""vLLM besides the conformance suite: a dying server, refusals of the program, and a whole run."""

import asyncio
import contextlib
import inspect
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from april.observe.report.run_folder import read_records
from april.weights.base import BaseWeights
from april.weights.channel import Adapter
from april.wire.message import Version
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, V1, VOCABULARY, drive, prompt
from april.workers.engines.sglang.client import ServerRefuses, SGLangClient
from april.workers.engines.sglang.server import ServerFailed, SGLangServer
from april.workers.engines.vllm.engine import VLLMEngine, VLLMSettings
from tests.support.attached_servers import VLLM_PYTHON
from tests.support.run_processes import assert_closed, steps_recorded, wait_until
from tests.support.server_faults import (
    PATIENCE_S,
    assert_samples_survive,
    bring_back,
    kill_all,
    name_of,
    send,
    server_processes,
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.vllm]


@pytest.fixture(scope="module")
def settings(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    return VLLMSettings(VLLM_PYTHON, tiny_model().folder, log, slots=16, context_tokens=640)


@pytest.fixture(scope="module")
def engine(settings):
    """An engine on its own server, which the tests harm."""
    options = {"slots": 16, "chunk_tokens": 16, "stream_tokens": 4}
    engine = VLLMEngine(settings.model, VOCABULARY, 640, server=SGLangServer(settings), **options)
    yield engine
    engine.close()


HARM = {
    "whole server killed": kill_all,
    "engine killed": lambda engine: send(engine, "EngineCore", signal.SIGKILL),
    "engine hung": lambda engine: send(engine, "EngineCore", signal.SIGSTOP),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_server_that_dies_or_hangs_is_restarted_and_samples_continue(held, tiny_model, harm):
    assert_samples_survive(held, tiny_model(), lambda: HARM[harm](held), "vLLM server")


def test_a_broken_off_weight_update_ends_the_server(held, tiny_model, monkeypatch):
    """Nothing is generated with weights of an unknown version."""
    whole = drive(held, [Request(1, prompt(), 30, temperature=0.0)])[1]
    broken = tiny_model(seed=1).weights() | {"model.norm.weight": tiny_model().weights()["model.norm.weight"][:7]}
    del broken["lm_head.weight"]
    monkeypatch.setattr(held._push, "check", lambda tensors: tensors)
    with pytest.raises(EngineError, match="updated in part"):
        held.load_weights(V1, broken)
    assert held.version is None and not held.ready
    monkeypatch.undo()
    bring_back(held, tiny_model())
    assert drive(held, [Request(1, prompt(), 30, temperature=0.0)])[1].tokens == whole.tokens


COMPARED = """
import sys, types, torch
sys.path.insert(0, sys.argv[1])
from program import WeightsInPlace
from safetensors.torch import save_file
parts = {f"a.{name}_proj.weight": torch.rand(4, 3) for name in "kvq"} | {"head.weight": torch.rand(5, 3)}
save_file(parts, sys.argv[2] + "/model.safetensors")
whole = torch.cat([parts[f"a.{name}_proj.weight"] for name in "qkv"]).bfloat16()
model = torch.nn.Module()
model.a, model.head = torch.nn.Module(), torch.nn.Linear(3, 8, bias=False)
model.a.qkv_proj = torch.nn.Linear(3, 12, bias=False, dtype=torch.bfloat16)
model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
model.a.qkv_proj.weight.data.copy_(whole)
model.head.weight.data[:5] = parts["head.weight"]
worker = WeightsInPlace()
worker.model_runner = types.SimpleNamespace(get_model=lambda: model)
worker.compare_with(sys.argv[2])
model.a.qkv_proj.weight.data[7, 1] += 0.01
try:
    worker.compare_with(sys.argv[2])
except ValueError as error:
    print(error)
"""


def test_a_parameter_that_vllm_holds_otherwise_is_named_after_a_reload(tmp_path):
    program = str(Path(inspect.getfile(VLLMEngine)).parent)
    command = [VLLM_PYTHON, "-c", COMPARED, program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "other values than it was sent for a.qkv_proj.weight" in done.stdout


def test_a_killed_program_takes_its_engine_with_it(held):
    """Also where nobody is left to end them all: a killed worker's server is ended by the kernel, program first."""
    program = held._server._process.pid
    others = set(server_processes(held)) - {program}
    assert any("EngineCore" in name_of(pid) for pid in others)
    os.kill(program, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while (left := others & set(server_processes(held))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def asked(**params):
    own = {
        "max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "sampling_seed": 0, "stop_token_ids": [], "stream_interval": 1,
    }  # fmt: skip
    return {"rid": "1", "input_ids": [1], "extra_key": "", "sampling_params": own | params}


REFUSED = {
    "a folder without weights": ("/update_weights_from_disk", {"model_path": "/"}, "/ holds no .safetensors file"),
    "an answer that cannot be": ("/generate", asked(temperature=3.0), r"temperature must be in \[0, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_program_refuses_bad_calls_and_continues(vllm_server, case):
    path, body, why = REFUSED[case]

    async def ask():
        client = SGLangClient(vllm_server.url, name="vLLM")
        try:
            if path == "/generate":
                return [event async for event in client.generate(body)]
            return await client.call(path, body)
        finally:
            await client.close()

    with pytest.raises(ServerRefuses, match=why):
        asyncio.run(ask())
    assert vllm_server.alive


def test_weights_do_not_change_under_a_request(vllm_server, tiny_model):
    async def load_while_it_generates():
        client = SGLangClient(vllm_server.url, name="vLLM")
        async with contextlib.aclosing(client.generate(asked(max_new_tokens=600))) as events:
            await anext(events)
            with pytest.raises(ServerRefuses, match="/pause_generation"):
                await client.call("/update_weights_from_disk", {"model_path": str(tiny_model().folder)})
        await client.close()

    asyncio.run(load_while_it_generates())


def adapter_of(base, seed, rank=4):
    """An adapter of every linear layer, as the learner publishes it."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in base.tensors.items():
        if name.endswith("_proj.weight"):
            shapes = {"lora_A": (rank, weight.shape[1]), "lora_B": (weight.shape[0], rank)}
            for part, shape in shapes.items():
                tensors[f"{name.removesuffix('.weight')}.{part}"] = torch.randn(shape, generator=generator) / 5
    return Adapter(base.checksum, 1.5, "float32", ["lm_head.weight"]), tensors


def test_tokens_are_of_the_server_s_own_weights_with_the_newest_adapter(settings, tiny_model):
    """A refused adapter leaves the previous one; whole weights replace base weights and adapter."""
    server = SGLangServer(replace(settings, adapter_rank=4))
    engine = VLLMEngine(settings.model, VOCABULARY, 640, server=server, slots=16, chunk_tokens=16, stream_tokens=4)
    base, text = BaseWeights(settings.model), prompt(40)
    try:
        assert engine.takes_adapters
        for version, seed in ((V0, 1), (V1, 2)):
            adapter, tensors = adapter_of(base, seed)
            engine.load_adapter(version, adapter, tensors)
            made = dict(base.with_adapter(adapter, tensors))
            expected = tiny_model().logprobs_under(made, text.tolist())
            assert np.abs(engine.score(text) - expected.numpy()).max() < 1e-4
            stream = drive(engine, [Request(seed, prompt(), 30)])[seed]
            expected = tiny_model().logprobs_under(made, [*prompt().tolist(), *stream.tokens])[-30:]
            assert np.abs(np.array(stream.logprobs) - expected.numpy()).max() < 1e-4
            assert set(stream.versions) == {version}
        scored = engine.score(text)
        spoilt = tensors | {next(iter(tensors)): torch.full((4, 48), torch.nan)}
        for wrong, why in ((spoilt, "not finite"), (adapter_of(base, 3, rank=9)[1], "greater than max_lora_rank")):
            with pytest.raises(EngineError, match=why):
                engine.load_adapter(Version(0, 2), adapter, wrong)
            assert engine.version == V1 and np.array_equal(engine.score(text), scored)
        others = {name: value for name, value in tiny_model(seed=1).weights().items() if name != "lm_head.weight"}
        engine.load_weights(Version(0, 3), others)
        assert np.abs(engine.score(text) - tiny_model().logprobs_under(others, text.tolist()).numpy()).max() < 1e-4
        assert not engine.takes_adapters
        with pytest.raises(EngineError, match="than its model's"):
            engine.load_adapter(Version(0, 4), adapter, tensors)
    finally:
        engine.close()


def test_a_restarted_server_continues_with_the_newest_adapter(start_run, run_dir, gate):
    """Beside the model's weights and proven, while the run is held and nothing new is published; what is sampled
    then is of what the learner trains. The entropy term trains every token."""
    words = ["--worker.engine", "vllm", "--engine.python", str(VLLM_PYTHON), "--worker.count", "1"]
    lora = ["--lora.rank", "4", "--learner.lr", "1e-2", "--algorithm.entropy_coef", "0.01", "--schedule.max_steps", "5"]

    def newest():
        return f"0.{(run_dir / 'logs/learner.log').read_text().count(' trained in ')}"

    def proven(log):
        return re.findall(r"adapter of version (\S+) beside its model's weights.*?version \1 is proven", log, re.DOTALL)

    def worker_log():
        return (run_dir / "logs/worker-0.log").read_text()

    job = start_run(*words, *lora, *gate.hold(2))
    wait_until(lambda: steps_recorded(run_dir) >= 2 and newest() in proven(worker_log()), job, PATIENCE_S)
    job.kill("vllm/program")
    wait_until(lambda: newest() in proven(worker_log().partition("the vLLM server serves again")[2]), job, PATIENCE_S)
    gate.open()
    assert job.wait(PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert found["steps"] == 5 and not found["tokens"]["discarded"] and not job.restarts
    steps = read_records(run_dir / "metrics.jsonl")
    before, after = (
        [gap["mean"] for step in some for gap in step["engine_gaps"].values() if gap["age"] == 0]
        for some in (steps[:2], steps[3:])
    )
    assert before and after and max(before + after) < 1e-4


def test_an_unknown_option_is_refused_with_the_server_s_log(settings):
    with pytest.raises(ServerFailed, match=r"--no-such"):
        VLLMEngine(settings.model, VOCABULARY, 640, server=SGLangServer(replace(settings, options={"no_such": 1})))


@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_run_finishes_although_its_server_is_killed(start_run, run_dir, gate):
    words = ["--worker.engine", "vllm", "--engine.python", str(VLLM_PYTHON), "--worker.count", "1"]
    budget = ["--sampling.max_response_tokens", "120", "--schedule.max_steps", "5"]
    job = start_run(*words, *budget, *gate.hold(2))
    wait_until(lambda: steps_recorded(run_dir) >= 2, job, PATIENCE_S)
    job.kill("vllm/program")
    gate.open()
    assert job.wait(2 * PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert found["steps"] == 5 and found["state"] == "finished" and not job.restarts
    assert "the vLLM server serves again" in (run_dir / "logs/worker-0.log").read_text()
    assert found["tokens"]["refused"] == 0 and not found["tokens"]["discarded"]
    wait_until(lambda: job.descendants() == [])
