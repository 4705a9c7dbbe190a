"""On-policy distillation: the advantage of a token from its teacher, and the gradient that it makes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from april.config import Config
from april.learner.batch import TrainingBatch
from april.learner.diagnostics import StepTotals
from april.learner.losses.columns import MAX_LOG_RATIO, Spans
from april.learner.losses.distillation import reverse_kl
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from tests.support.learner.small_learner import make_sample

LENGTHS = (1, 7, 40)
PLAIN = {
    "loss": "ppo", "clip_low": 1.0, "clip_high": 1e6, "corrections": [], "behaviour_coef": 0.0,
    "distillation": "reverse_kl",
}  # fmt: skip
"""The plain policy gradient."""


def section(**keys):
    config = {"model": {"path": "."}, "data": {"path": "rows.jsonl"}, "teacher": {"big": {"path": "."}}}
    return Config.model_validate(config | {"algorithm": PLAIN | keys})


def reference(teacher, old, discount):
    """The advantages of one response's tokens, from the definition."""
    gains = np.clip(teacher - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return [sum(gains[s] * discount ** (s - t) for s in range(t, len(gains))) for t in range(len(gains))]


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_the_advantage_is_the_discounted_sum_of_the_teacher_s_log_ratios(discount):
    rng = np.random.default_rng(0)
    teacher, old = (-rng.exponential(8.0, sum(LENGTHS)) for _ in range(2))
    assert (np.abs(teacher - old) > MAX_LOG_RATIO).any()
    index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    spans = Spans(index, torch.tensor(LENGTHS, dtype=torch.float32))
    keys = section(distillation_discount=discount).algorithm
    found = reverse_kl(torch.from_numpy(teacher), torch.from_numpy(old), spans, keys)
    ends = np.cumsum(LENGTHS)
    expected = [
        reference(teacher[end - n : end], old[end - n : end], discount) for n, end in zip(LENGTHS, ends, strict=True)
    ]
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-9, atol=1e-9)


def scored_batch(rng):
    """A group with three samples, of which the last has no teacher."""
    samples = [make_sample(rng, 2, length, reward) for length, reward in ((3, 1.0), (5, 0.0), (4, 0.0))]
    columns = [{"big": -rng.exponential(2.0, s.response_tokens).astype(np.float32)} for s in samples[:2]]
    scored = [replace(sample, token_scores=column) for sample, column in zip(samples, columns, strict=False)]
    return TrainingBatch(1, [[*scored, samples[2]]])


@pytest.mark.parametrize(("advantage", "of_one"), [("dr_grpo", False), ("no_reward", False), ("no_reward", True)])
def test_the_loss_adds_it_to_the_reward_s_advantage_and_its_gradient_is_that_of_finite_differences(advantage, of_one):
    """`of_one`: each sample is a group of its own."""
    config = section(advantage=advantage, distillation_coef=0.5, distillation_discount=0.5, normalisation="token_mean")
    objective, rng = Objective(config, SingleRank()), np.random.default_rng(1)
    batch = scored_batch(rng)
    batch = TrainingBatch(1, [[sample] for sample in batch.samples]) if of_one else batch
    prepared = objective.prepare(batch)
    assert len(prepared.samples) == 3, "also those whose reward teaches nothing"
    assert prepared.metrics["gradient_groups"] == len(batch.groups)
    tokens = objective.tokens(prepared, [0, 1, 2], torch.device("cpu"))
    double = {
        "behaviour_logprobs": tokens.behaviour_logprobs,
        "advantages": tokens.advantages,
        "weights": tokens.weights,
    }
    tokens = replace(tokens, **{name: column.double() for name, column in double.items()})
    spans = Spans(tokens.spans.index, tokens.spans.lengths.double())
    tokens = replace(tokens, teacher_logprobs=tokens.teacher_logprobs.double(), spans=spans)
    logprobs = (tokens.behaviour_logprobs + 0.1 * torch.randn(12).double()).requires_grad_()
    old, centred = logprobs.detach(), [2 / 3, -1 / 3, -1 / 3]
    expected, first = [], 0
    for sample, reward in zip(batch.samples, centred, strict=True):
        own = old[first : first + sample.response_tokens].numpy()
        teacher = sample.token_scores.get("big", own).astype(np.float64)
        expected.append((reward if advantage == "dr_grpo" else 0) + 0.5 * np.array(reference(teacher, own, 0.5)))
        first += sample.response_tokens
    weighted = torch.from_numpy(np.concatenate(expected)) * tokens.weights
    context = objective.batch_contexts([(tokens, old)], old.device)[0]

    def loss(column):
        return objective.loss(column, torch.zeros(12), tokens, StepTotals(torch.device("cpu")), context)

    loss(logprobs).backward()
    np.testing.assert_allclose(logprobs.grad, -weighted, rtol=1e-6, atol=1e-7)
    steps = 1e-6 * torch.eye(12, dtype=torch.float64)
    by_difference = [(loss(old + step) - loss(old - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(logprobs.grad, torch.stack(by_difference), rtol=1e-6, atol=1e-9)


def test_its_expected_gradient_is_that_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, weighted by the policy, with the KL's gradient by finite differences."""
    generator = torch.Generator().manual_seed(2)
    logits, teacher_logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    teacher = teacher_logits.log_softmax(0)

    def divergence(logits):
        own = logits.log_softmax(0)
        return (own.exp() * (own - teacher)).sum()

    policy = logits.log_softmax(0)
    spans = Spans(torch.arange(6), torch.ones(6))
    advantages = reverse_kl(teacher, policy, spans, section().algorithm)
    gradient = torch.zeros(6, dtype=torch.float64)
    for token in range(6):
        score = torch.eye(6, dtype=torch.float64)[token] - policy.exp()
        gradient += policy[token].exp() * -advantages[token] * score
    steps = 1e-6 * torch.eye(6, dtype=torch.float64)
    by_difference = [(divergence(logits + step) - divergence(logits - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, torch.stack(by_difference), atol=1e-9)


def test_a_metric_says_how_far_the_policy_is_from_its_teacher():
    objective, batch = Objective(section(), SingleRank()), scored_batch(np.random.default_rng(3))
    tokens = objective.tokens(objective.prepare(batch), [0, 1, 2], torch.device("cpu"))
    totals = StepTotals(torch.device("cpu"))
    objective.loss(tokens.behaviour_logprobs.clone().requires_grad_(), torch.zeros(12), tokens, totals)
    gaps = [s.logprobs - s.token_scores["big"] for s in batch.samples[:2]]
    assert totals.metrics()["teacher_kl"] == pytest.approx(np.concatenate(gaps).sum() / 12, rel=1e-5)
