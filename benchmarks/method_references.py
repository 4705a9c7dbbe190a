"""How far the methods are from their definitions, on random numbers in float64: one gap for each case."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from april.config import Config
from april.config.section import bound
from april.learner.batch import TrainSample
from april.learner.losses import DIVERGENCES
from april.learner.losses.columns import MAX_LOG_RATIO, Spans
from april.learner.losses.distillation import reverse_kl
from april.learner.losses.gdpo import gdpo
from april.learner.losses.pass_at_k import pass_at_k
from april.learner.packing import HeadInputs
from april.learner.teacher import divergence_from
from april.learner.turns import turn_returns
from april.wire.message import Version

DISCOUNTS = (0.0, 0.5, 1.0)
GROUPS, SAMPLES, PARTS, TURNS = 12, 8, 3, 9
TARGETS, IDS = 5, 1_000_000
"""Targets, and ids of a head so large that a piece has few targets."""
Generator = np.random.Generator


def gaps(rng: Generator) -> Iterator[float]:
    """Largest absolute difference of each case."""
    for of_method in (distillation_gaps, divergence_gaps, gdpo_gaps, pass_at_k_gaps, turn_gaps):
        yield from of_method(rng)


def distillation_gaps(rng: Generator) -> Iterator[float]:
    lengths = rng.integers(1, 60, 20)
    index = torch.arange(len(lengths)).repeat_interleave(torch.from_numpy(lengths))
    spans = Spans(index, torch.from_numpy(lengths).float())
    for discount in DISCOUNTS:
        teacher, old = (-rng.exponential(8.0, lengths.sum()) for _ in range(2))
        section = configured(distillation_discount=discount).algorithm
        found = reverse_kl(torch.from_numpy(teacher), torch.from_numpy(old), spans, section).numpy()
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            gains = np.clip(teacher - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)[end - length : end]
            powers = np.power(discount, np.subtract.outer(np.arange(length), np.arange(length)).T.clip(0))
            yield float(np.abs(found[end - length : end] - np.triu(powers) @ gains).max())


def divergence_gaps(rng: Generator) -> Iterator[float]:
    """Of the values, and of the gradients by hidden states and by the head, of some pieces."""
    mix, (teacher, policy) = 0.3, [torch.from_numpy(rng.normal(size=(IDS, width))) for width in (12, 8)]
    seen, hidden = (torch.from_numpy(rng.normal(size=(TARGETS, width))) for width in (12, 8))
    inputs = hidden.requires_grad_(), policy.requires_grad_()

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * (one / other).log()).sum(-1)

    p, q = (seen @ teacher.T).softmax(-1), (hidden @ policy.T / 0.8).softmax(-1)
    mixed = mix * p + (1 - mix) * q
    definitions = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p)}
    definitions["jensen_shannon"] = mix * kl(p, mixed) + (1 - mix) * kl(q, mixed)
    for name, expected in definitions.items():
        divergence = bound(DIVERGENCES.find(name), configured(divergence_mix=mix).algorithm)
        heads = HeadInputs(seen, teacher, 1.0, None), HeadInputs(hidden, policy, 0.8, None)
        found = divergence_from(heads[0], divergence, heads[1])
        yield float((found - expected).detach().abs().max())
        gradients = (torch.autograd.grad(each.sum(), inputs, retain_graph=True) for each in (found, expected))
        for one, other in zip(*gradients, strict=True):
            yield float((one - other).abs().max())


def gdpo_gaps(rng: Generator) -> Iterator[float]:
    values = rng.normal(size=(GROUPS, SAMPLES, PARTS)) * 10.0 ** rng.integers(-3, 4, PARTS)
    weights = rng.normal(size=PARTS)
    apart = (values - values.mean(1, keepdims=True)) / values.std(1, ddof=1, keepdims=True)
    summed = (apart * weights).sum(2)
    expected = (summed - summed.mean()) / summed.std(ddof=1)
    found = gdpo(list(torch.from_numpy(values)), [], torch.from_numpy(weights))
    yield float(np.abs(torch.stack(found).numpy() - expected).max())


def pass_at_k_gaps(rng: Generator) -> Iterator[float]:
    for k in (1, 2, 4):
        right = rng.random(SAMPLES) < 0.4
        sets = list(combinations(range(SAMPLES), k))
        best = np.array([right[list(chosen)].any() for chosen in sets], float)
        normalised = (best - best.mean()) / (best.std() or 1.0)
        expected = [normalised[[i in chosen for chosen in sets]].mean() for i in range(SAMPLES)]
        [found] = pass_at_k([torch.from_numpy(right.astype(float))], [], pass_k=k)
        yield float(np.abs(found.numpy() - expected).max())


def turn_gaps(rng: Generator) -> Iterator[float]:
    for discount in DISCOUNTS[1:]:
        given, outcome = rng.normal(size=TURNS), float(rng.normal())
        column = np.repeat(given, 2).astype(np.float32)
        segments = tuple((2 * turn, 2 * turn + 1, Version(0, 0)) for turn in range(TURNS))
        tokens = np.zeros(1 + 2 * TURNS, np.int32)
        response = TrainSample(tokens, 1, column, outcome, segments, token_scores={"step": column})
        gained = column[::2].astype(float)
        gained[-1] += outcome
        expected = [sum(discount ** (s - t) * gained[s] for s in range(t, TURNS)) for t in range(TURNS)]
        yield float(np.abs(turn_returns(response, "step", discount) - expected).max())


def configured(**algorithm: object) -> Config:
    tree = {"model": {"path": Path()}, "data": {"path": "unused.jsonl"}}
    return Config.model_validate(tree | {"algorithm": algorithm})
