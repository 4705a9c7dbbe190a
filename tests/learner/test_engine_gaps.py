"""Gaps between learner and engine on each worker's youngest trained tokens."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from april.learner.batch import TrainingBatch
from april.learner.objective import token_ages
from april.learner.token_stats import sampling_workers, worker_indices
from april.learner.trainer import Trainer
from april.wire.message import Version
from april.wire.training import SampleSpan
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, stale_batch


@pytest.fixture(scope="module")
def batch(policy_folder):
    """Two workers sampled alternating spans of several ages, a third only old tokens, a fourth one response."""
    names = (("a",), ("b",), ("a", "b"), ("b", "a", "b"))
    groups = []
    for number, group in enumerate(stale_batch(policy_folder).groups):
        made = [shared_out(sample, names[(number + place) % 4]) for place, sample in enumerate(group)]
        groups.append(made)
    one = groups[0][2]
    aged = tuple((start, end, Version(0, 3)) for start, end, _ in one.segments)
    groups[0][2:] = [
        replace(one, spans=(generated(0, "d"),)),
        replace(one, spans=(generated(0, "old"),), segments=aged, reward=0.0),
    ]
    return TrainingBatch(6, groups)


def shared_out(sample, names):
    cuts = [place * sample.response_tokens // len(names) for place in range(len(names))]
    return replace(sample, spans=tuple(generated(start, name) for start, name in zip(cuts, names, strict=True)))


def generated(start, worker):
    return SampleSpan("generate", worker, 0.0, 0.0, start, start, "abort")


def expected(batch, trainer):
    """Expected gaps, computed by hand: {worker: (tokens, mean, largest, age)}."""
    gaps = {}
    for sample, (logprobs, _) in zip(
        trainer.prepare(batch).prepared.samples, trainer.token_stats.per_sample(), strict=True
    ):
        ages = token_ages(sample, batch.step)
        for token, place in enumerate(sample.sampled_positions):
            worker = [name for start, name in sampling_workers(sample) if start <= place][-1]
            apart = abs(float(logprobs[token]) - float(sample.logprobs[place]))
            gaps.setdefault(worker, {}).setdefault(int(ages[token]), []).append(apart)
    youngest = {worker: (min(of_worker), of_worker[min(of_worker)]) for worker, of_worker in gaps.items()}
    return {worker: (len(one), np.mean(one), max(one), age) for worker, (age, one) in youngest.items()}


def said(metrics):
    workers = {name.rpartition("_")[2] for name in metrics if name.startswith("engine_gap_")}
    figures = ("tokens", "mean", "largest", "age")
    return {worker: tuple(metrics[f"engine_gap_{figure}_{worker}"] for figure in figures) for worker in workers}


def test_each_worker_is_measured_on_its_youngest_tokens_on_any_number_of_ranks(
    one_rank, policy_folder, tmp_path, batch
):
    config = make_config(policy_folder, tmp_path, microbatch_tokens=64)
    trainer = Trainer(config, torch.device("cpu"))
    metrics = trainer.step(batch)
    found, by_hand = said(metrics), expected(batch, trainer)
    assert found.keys() == by_hand.keys() >= {"a", "b", "d", "old"} and found["old"][-1] == 3
    for worker, figures in by_hand.items():
        assert found[worker] == pytest.approx(figures, rel=1e-4)
    [two] = run_ranks(2, [job(config, [batch])], tmp_path / "ranks")
    for worker, figures in found.items():
        assert said(two["metrics"][0])[worker] == pytest.approx(figures, rel=1e-4)


def test_truncated_spans_and_scoring_spans_sample_no_tokens(batch):
    stays = [generated(start, worker) for start, worker in ((0, "a"), (5, "b"), (8, "a"), (5, "c"), (5, "b"))]
    scored = generated(9, "s")
    sample = replace(batch.samples[0], spans=(*stays, SampleSpan("score", *msgspec.structs.astuple(scored)[1:])))
    assert sampling_workers(sample) == [(0, "a"), (5, "b")]


def test_tokens_without_a_known_worker_are_not_measured(one_rank, policy_folder, tmp_path, batch):
    found = worker_indices([(3, "b"), (5, "a")], ["a", "b"], np.array([0, 2, 3, 4, 5, 9]))
    assert found.tolist() == [-1, -1, 1, 1, 0, 0]
    nobody = TrainingBatch(6, [[replace(sample, spans=()) for sample in group] for group in batch.groups])
    assert said(Trainer(make_config(policy_folder, tmp_path), torch.device("cpu")).step(nobody)) == {}
