"""How far the methods are from their definitions, on random numbers in float64: one gap for each case."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from april.config import Config
from april.learner.losses.columns import MAX_LOG_RATIO, Spans
from april.learner.losses.distillation import reverse_kl
from april.learner.losses.gdpo import gdpo

DISCOUNTS = (0.0, 0.5, 1.0)
GROUPS, SAMPLES, PARTS = 12, 8, 3
Generator = np.random.Generator


def gaps(rng: Generator) -> Iterator[float]:
    """Largest absolute difference of each case."""
    for of_method in (distillation_gaps, gdpo_gaps):
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


def gdpo_gaps(rng: Generator) -> Iterator[float]:
    values = rng.normal(size=(GROUPS, SAMPLES, PARTS)) * 10.0 ** rng.integers(-3, 4, PARTS)
    weights = rng.normal(size=PARTS)
    apart = (values - values.mean(1, keepdims=True)) / values.std(1, ddof=1, keepdims=True)
    summed = (apart * weights).sum(2)
    expected = (summed - summed.mean()) / summed.std(ddof=1)
    found = gdpo(list(torch.from_numpy(values)), [], torch.from_numpy(weights))
    yield float(np.abs(torch.stack(found).numpy() - expected).max())


def configured(**algorithm: object) -> Config:
    tree = {"model": {"path": Path()}, "data": {"path": "unused.jsonl"}}
    return Config.model_validate(tree | {"algorithm": algorithm})
