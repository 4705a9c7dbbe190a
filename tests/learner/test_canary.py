"""The published canary log-probabilities are those of the published weights."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from april.learner import loop
from april.learner.canary import ROUNDING_EVERY
from april.learner.trainer import Trainer
from april.weights.canary import CANARY_TOKENS, canary_tokens
from april.wire.message import Version
from tests.support.learner.comparison import assert_said_by
from tests.support.learner.small_learner import VOCAB, Diary, make_config, uneven_batch


def test_every_version_is_published_with_the_canary_s_logprobs_under_its_weights(one_rank, policy_folder, tmp_path):
    diary = Diary(policy_folder, 2)
    config = make_config(policy_folder, tmp_path / "run")
    loop.run(config, Trainer(config, torch.device("cpu")), diary, diary)
    assert list(diary.canaries) == [Version(0, 0), Version(0, 1), Version(0, 2)]
    for version, canary in diary.canaries.items():
        assert_said_by(diary.weights[version], canary, policy_folder)
    first, second, last = diary.canaries.values()
    assert second.tokens == last.tokens and first.rounding > 0
    trained = np.concatenate([sample.tokens for sample in uneven_batch(0, policy_folder).samples])
    half = len(first.tokens) // 2
    assert second.tokens[:half] == trained[:half].tolist()
    assert second.tokens[half:] == first.tokens[: len(first.tokens) - half]
    assert {"canary_s"} <= diary.metrics[1].keys()


def test_no_canary_is_scored_when_it_is_switched_off(one_rank, policy_folder, tmp_path):
    diary = Diary(policy_folder, 1)
    config = make_config(policy_folder, tmp_path / "run")
    off = config.weights.model_copy(update={"canary": False})
    config = config.model_copy(update={"weights": off})
    loop.run(config, Trainer(config, torch.device("cpu")), diary, diary)
    assert set(diary.canaries.values()) == {None}


def test_the_canary_text_is_deterministic_and_made_of_frequent_tokens():
    text = canary_tokens(151_936)
    assert len(text) == CANARY_TOKENS and text.tolist() == canary_tokens(151_936).tolist()
    assert text[:4].tolist() == FIRST and text.min() >= 0 and text.max() < 151_936
    assert (text < 2_000).sum() > CANARY_TOKENS // 2
    assert canary_tokens(VOCAB, 7).max() < VOCAB and len(canary_tokens(VOCAB, 7)) == 7


FIRST = [37757, 171, 0, 107344]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_measured_rounding_is_that_of_two_computations_in_bfloat16(one_rank, policy_folder, tmp_path, compute):
    """Against the difference between a plain forward pass in float32 and one in bfloat16, which is one rounding."""
    config = make_config(policy_folder, tmp_path / "run", compute=compute)
    canary = Trainer(config, torch.device("cpu")).canary()
    tokens = torch.tensor(canary.tokens)
    logprobs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=dtype)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].float()
        logprobs[dtype] = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])
    one_rounding = (logprobs[torch.float32] - logprobs[torch.bfloat16]).abs().mean().item()
    assert one_rounding / 2 < canary.rounding < 3 * one_rounding


def test_rounding_is_measured_again_after_some_versions_and_for_another_text(
    one_rank, policy_folder, tmp_path, monkeypatch
):
    measured = []

    @contextmanager
    def counted(model):
        measured.append(model)
        yield

    monkeypatch.setattr("april.learner.canary.rounded_otherwise", counted)
    trainer = Trainer(make_config(policy_folder, tmp_path / "run"), torch.device("cpu"))
    for _ in range(ROUNDING_EVERY):
        trainer.canary()
    assert len(measured) == 1
    trainer.canary()
    assert len(measured) == 2
    trainer.step(uneven_batch(0, policy_folder))
    trainer.canary()
    assert len(measured) == 3
