"""A batch of several sources, each with its algorithm: every part counts as if it were alone, times its share."""

from dataclasses import replace

import numpy as np
import torch

from april.config import Config
from april.learner.algorithms import Algorithms
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.diagnostics import StepTotals
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from april.wire.message import Version

PPO = {"advantage": "dr_grpo", "loss": "ppo", "proximal": "behaviour", "corrections": [], "behaviour_coef": 0.3}
DISTILLED = {
    "advantage": "no_reward", "loss": "cross_entropy", "proximal": "recomputed", "behaviour_coef": 0.0,
    "distillation": "reverse_kl", "distillation_coef": 0.5, "normalisation": "sequence_mean", "loss_weight": 2.0,
    "kl_coef": 0.25, "kl_estimator": "k2",
}  # fmt: skip
LENGTHS = {0: [(4, 4), (16, 2), (2, 4)], 1: [(2, 8)]}
"""Tokens of both responses of each group, by source: weights and shares that float32 holds exactly."""


def made(algorithm, own, **learner):
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": own}]
    tree = {"model": {"path": "."}, "data": {"sources": sources}, "algorithm": algorithm, "learner": learner}
    return Config.model_validate(tree | {"teacher": {"big": {"path": "."}}})


def batch_of(rng):
    def sample(source, length, reward):
        columns = [rng.normal(-1.5, 0.7, length).astype(np.float32) for _ in range(2)]
        tokens, versions = np.arange(length + 2, dtype=np.int32), ((0, length, Version(0, 0)),)
        return TrainSample(tokens, 2, columns[0], reward, versions, token_scores={"big": columns[1]}, source=source)

    groups = {source: [[sample(source, *row) for row in zip(pair, (1.0, 0.0), strict=True)] for pair in pairs]
              for source, pairs in LENGTHS.items()}  # fmt: skip
    return TrainingBatch(0, [groups[0][0], *groups[1], *groups[0][1:]])


class Scored:
    """Log-probabilities of a batch's rows under the policy, by row, float64 with gradients, and under its start."""

    def __init__(self, batch, rng):
        self.rows = {id(sample): rng.normal(-1.5, 0.7, (2, sample.sampled_tokens)) for sample in batch.samples}
        self.leaves = {key: torch.tensor(row[0], requires_grad=True) for key, row in self.rows.items()}

    def start(self, sample):
        return torch.tensor(self.rows[id(sample)][1])

    def gradient(self, objective, prepared, number):
        """{row: gradient} of the loss of the rows of an objective."""
        indices = [i for i, each in enumerate(prepared.objectives) if each == number]
        samples = [prepared.samples[i] for i in indices]
        tokens = objective.tokens(prepared, indices, torch.device("cpu"))
        tokens = replace(tokens, scores={"reference_logprobs": torch.cat(list(map(self.start, samples)))})
        leaves = [self.leaves[id(sample)] for sample in samples]
        totals, logprobs = StepTotals(torch.device("cpu"), 2), torch.cat(leaves)
        loss = objective.loss(logprobs, torch.zeros_like(logprobs), tokens, totals)
        found = {id(s): g for s, g in zip(samples, torch.autograd.grad(loss, leaves), strict=True)}
        return found, totals.metrics()


def reference(batch, scored):
    """The documented sum, in float64: three of four groups are PPO's, one is the teacher's."""
    loss = torch.zeros((), dtype=torch.float64)
    for group in batch.groups:
        for sample in group:
            x, mu = scored.leaves[id(sample)], torch.from_numpy(sample.logprobs).double()
            if sample.source == 0:
                advantage = sample.reward - 0.5
                ratio = (x - mu).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.28) * advantage)
                loss = loss + 3 / 4 * (0.3 * (x - mu) ** 2 / 2 - surrogate).sum() / 32
            else:
                teacher = torch.from_numpy(sample.token_scores["big"]).double()
                advantage = 0.5 * (teacher - x.detach())
                kl = 0.25 * (x - scored.start(sample)) ** 2 / 2
                loss = loss + 1 / 4 * 2.0 * (kl - advantage * x).mean() / 2
    names = list(scored.leaves)
    return dict(zip(names, torch.autograd.grad(loss, list(scored.leaves.values())), strict=True))


def test_the_parts_of_a_batch_add_up_to_the_documented_sum_and_each_is_as_alone():
    rng = np.random.default_rng(4)
    config, batch = made(PPO, DISTILLED), batch_of(rng)
    algorithms, scored = Algorithms(config, SingleRank()), Scored(batch, rng)
    prepared, expected = algorithms.prepare(batch), reference(batch, scored)
    assert [prepared.samples[i].tokens is batch.samples[j].tokens for i, j in enumerate(prepared.batch_indices)]
    seen = set()
    for number, keys in enumerate((PPO, DISTILLED)):
        found, metrics = scored.gradient(algorithms.objectives[number], prepared, number)
        whole = Objective(made(PPO | keys, {}), SingleRank())
        groups = [group for group in batch.groups if group[0].source == number]
        alone, _ = scored.gradient(whole, whole.prepare(TrainingBatch(0, groups)), 0)
        for row, gradient in found.items():
            assert (gradient - expected[row]).abs().max() <= 1e-9
            assert (gradient - len(groups) / 4 * alone[row]).abs().max() <= 1e-9
        seen |= found.keys()
        tokens = metrics[f"trained_tokens_source_{number}"]
        assert metrics["trained_tokens"] == tokens == sum(map(sum, LENGTHS[number]))
        assert ("reference_kl" in metrics) == (number == 1) == (f"reference_kl_source_{number}" in metrics)
    assert seen == set(scored.leaves)
    figures = {name: prepared.metrics[name] for name in ("groups", "groups_source_0", "groups_source_1")}
    assert figures == {"groups": 4, "groups_source_0": 3, "groups_source_1": 1}
    assert prepared.metrics["tokens_source_1"] == 10 and prepared.metrics["reward_source_1"] == 0.5


def test_rewards_of_turns_have_the_same_figures_in_every_batch():
    batch = batch_of(np.random.default_rng(1))
    figures = {}
    for run, own in (("", "big"), ("big", "big")):
        algorithms = Algorithms(made({**PPO, "turn_reward": run}, {**PPO, "turn_reward": own}), SingleRank())
        for groups in (batch.groups, batch.groups[:1]):
            names = {name for name in algorithms.prepare(TrainingBatch(0, groups)).metrics if "turn_reward" in name}
            figures.setdefault((run, own), []).append(names)
    known = {"turn_reward", "turn_rewards_known"}
    first, second = ({f"{name}_source_{source}" for name in known} for source in (0, 1))
    assert figures == {("", "big"): [second, set()], ("big", "big"): [known | first | second, known | first]}


def test_a_part_counts_by_its_share_of_each_minibatch():
    batch = batch_of(np.random.default_rng(1))
    algorithms = Algorithms(made({**PPO, "normalisation": "sequence_mean"}, DISTILLED, minibatches=2), SingleRank())
    prepared, places = algorithms.prepare(batch), algorithms.objectives[0].minibatches(batch)
    (of_teacher,) = (place for place, group in zip(places, batch.groups, strict=True) if group[0].source)
    totals = np.zeros((2, 2))
    for sample, weight, place, number in zip(
        prepared.samples, prepared.weights, prepared.minibatches, prepared.objectives, strict=True
    ):
        totals[place, number] += weight * sample.sampled_tokens
    assert totals[of_teacher].tolist() == [0.5, 0.5 * 2.0] and totals[1 - of_teacher].tolist() == [1, 0]
