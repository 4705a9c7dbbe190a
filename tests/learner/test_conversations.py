"""Conversations beside the samples of a batch add their weighted cross-entropy to its loss, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from april.config.data import DataSection, SourceSection
from april.learner.batch import TrainingBatch, decode, encode
from april.learner.trainer import Trainer
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, make_sample, uneven_batch

WEIGHTS = {1: 0.5, 2: 0.125}
"""Weight of each source of conversations, by its number."""


def mixed(config):
    """`config` with a source of prompts and two of conversations."""
    own = [SourceSection(path=f"{number}.jsonl", kind="sft", sft_weight=weight) for number, weight in WEIGHTS.items()]
    return config.model_copy(update={"data": DataSection(sources=[SourceSection(path="0.jsonl"), *own])})


def conversations(count=7):
    rng = np.random.default_rng(5)
    shapes = [(int(rng.integers(1, 9)), int(rng.integers(1, 40))) for _ in range(count)]
    return [replace(make_sample(rng, *shape, 1.0), source=1 + number % 2) for number, shape in enumerate(shapes)]


def gradients(config, batch):
    """{name: gradient} of the first optimizer step of a batch, and its metrics."""
    trainer, found = Trainer(config, torch.device("cpu")), {}

    def update(lr):
        for name, parameter in trainer.policy.trained:
            gradient = parameter.grad
            found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    trainer.update = update
    return found, trainer.step(batch)


def reference(folder, samples):
    """{name: gradient} of the documented term, by transformers, a row at a time."""
    model, loss = AutoModelForCausalLM.from_pretrained(folder), 0.0
    tokens = {source: sum(s.sampled_tokens for s in samples if s.source == source) for source in WEIGHTS}
    for sample in samples:
        labels = torch.from_numpy(sample.tokens).long()
        logits = model(labels[None]).logits[0, sample.prompt_tokens - 1 : -1]
        total = torch.nn.functional.cross_entropy(logits, labels[sample.prompt_tokens :], reduction="sum")
        loss = loss + WEIGHTS[sample.source] * total / tokens[sample.source]
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, loss.item()


def test_the_gradient_is_that_of_the_samples_and_of_transformers_weighted_cross_entropy(
    one_rank, policy_folder, tmp_path
):
    """The samples are at another temperature than the conversations."""
    config = mixed(make_config(policy_folder, tmp_path / "run", grad_clip=1e9, microbatch_tokens=64))
    batch, rows = uneven_batch(0, policy_folder), conversations()
    alone, before = gradients(config, batch)
    both, metrics = gradients(config, replace(batch, conversations=rows, left_out={"too_long": 2}))
    expected, term = reference(policy_folder, rows)
    for name, gradient in both.items():
        assert (gradient - alone[name] - expected[name]).abs().max() < 1e-5, name
    assert metrics["loss"] == pytest.approx(before["loss"] + term, rel=1e-5)
    assert metrics["sft_rows"] == 7 and metrics["sft_too_long"] == 2
    assert metrics["sft_tokens"] == sum(row.sampled_tokens for row in rows)
    parts = sum(weight * metrics[f"sft_loss_source_{source}"] for source, weight in WEIGHTS.items())
    assert parts == pytest.approx(term, rel=1e-5)
    for name in ("tokens", "trained_tokens", "samples", "reward", "k1", "entropy", "ess"):
        assert metrics[name] == pytest.approx(before[name], rel=1e-6), name
    assert "sft_rows" not in before and "sft_loss" not in before


@pytest.mark.full
def test_ranks_share_the_conversations_of_each_optimizer_step(policy_folder, tmp_path):
    config = mixed(make_config(policy_folder, tmp_path / "run", minibatches=2, epochs=2, microbatch_tokens=64))
    batch = replace(uneven_batch(0, policy_folder), conversations=conversations())
    (one,) = run_ranks(1, [job(config, [batch])], tmp_path)
    two, again = run_ranks(2, [job(config, [batch]), job(config, [batch])], tmp_path)
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).abs().max() < 0.2 * config.learner.lr, name
        assert torch.equal(two["weights"][name], again["weights"][name])
    for name in ("sft_rows", "sft_tokens", "sft_loss", "loss"):
        assert two["metrics"][0][name] == pytest.approx(one["metrics"][0][name], rel=1e-4), name


def test_a_batch_without_samples_still_trains_its_conversations(one_rank, policy_folder, tmp_path):
    config = mixed(make_config(policy_folder, tmp_path / "run"))
    rows = conversations()
    decoded = decode(encode(TrainingBatch(0, [], conversations=rows)))
    for row, sent in zip(rows, decoded.conversations, strict=True):
        assert np.array_equal(row.tokens, sent.tokens) and (row.source, row.segments) == (sent.source, sent.segments)
    trainer = Trainer(config, torch.device("cpu"))
    metrics = trainer.step(decoded)
    assert trainer.optimizer_steps == 1 and metrics["trained_tokens"] == 0 and metrics["sft_loss"] > 0
