"""Fits the cost model to a real engine: decode steps of steady crowds of sequences, and updates of the weights."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import numpy as np
import tomli_w

from april.config.costs import EngineCost

LONGEST = (64, 256, 1024)
"""tokens of the longest response of a crowd, in which all lengths up to it are as likely"""
SHARES = (1 / 16, 1 / 4, 1 / 2, 1)
"""of the slots that have a sequence"""
REPEATS = 3
"""of which the median counts"""
LEAST_S = 1e-9
"""a is a cost, so that a fit that would make it negative puts it here"""


@dataclass(frozen=True)
class Timing:
    """Decode steps of sequences of which each that ends is replaced, then new weights."""

    running: int
    steps: float
    kv: float
    """tokens in the cache, mean over the steps"""
    admissions: int
    """steps before which sequences came in the place of ended ones"""
    admitted: int
    """these sequences"""
    admitted_tokens: int
    """their context"""
    decode_s: float
    """all of this took so long"""
    pause_s: float
    """to take new weights in"""
    context: int
    """tokens of all sequences that were computed again after that"""
    prefill_s: float
    """which took so long"""

    def decode_terms(self) -> list[float]:
        """What each cost of `EngineCost` is counted by in `decode_s`, in the order of `COSTS`."""
        steps = [self.steps, self.steps * self.running, self.steps * self.kv]
        return [*steps, self.admissions, self.admitted, self.admitted_tokens]

    def prefill_terms(self) -> list[float]:
        return [0, 0, 0, 1, self.running, self.context]


COSTS = ("decode_base_s", "decode_running_s", "decode_kv_s", "admit_s", "request_s", "prefill_s")


class Probe(Protocol):
    """An engine that can be asked for a crowd of so many sequences whose responses have up to so many tokens."""

    slots: int
    longest_response: int

    def time(self, running: int, longest: int) -> Timing:
        """The same crowd each time, as far as the engine lets it be."""


def measure(probe: Probe) -> list[Timing]:
    """Timings over a grid of running sequences and lengths."""
    counts = sorted({max(1, round(probe.slots * share)) for share in SHARES})
    probe.time(probe.slots, min(LONGEST[0], probe.longest_response))  # what is slow the first time
    return [
        middle([probe.time(running, longest) for _ in range(REPEATS)])
        for longest in sorted({min(longest, probe.longest_response) for longest in LONGEST})
        for running in counts
    ]


def middle(timings: list[Timing]) -> Timing:
    """Medians of what was timed several times."""
    medians = {name: median(getattr(one, name) for one in timings) for name in ("decode_s", "pause_s", "prefill_s")}
    return replace(timings[0], **medians)


@dataclass(frozen=True)
class Fit:
    cost: EngineCost
    timings: list[Timing]
    prefix_cache: bool = True

    @property
    def errors(self) -> np.ndarray:
        """Predicted over measured times of the decode steps, less 1."""
        costs = [getattr(self.cost, name) for name in COSTS]
        return np.array([np.dot(one.decode_terms(), costs) / one.decode_s for one in self.timings]) - 1

    @property
    def pause_s(self) -> float:
        """Seconds for which full slots stand still while weights are taken in; then contexts are computed again."""
        most = max(one.running for one in self.timings)
        return median(one.pause_s for one in self.timings if one.running == most)

    def describe(self) -> str:
        cost = self.cost
        half, worst = np.percentile(np.abs(self.errors), [50, 95])
        return (
            f"decode step = {cost.decode_base_s * 1e3:.3f} ms + {cost.decode_running_s * 1e6:.2f} us x running + "
            f"{cost.decode_kv_s * 1e9:.2f} ns x KV tokens\n"
            f"prefill = {cost.admit_s * 1e3:.3f} ms + {cost.request_s * 1e3:.3f} ms x sequences + "
            f"{cost.prefill_s * 1e6:.2f} us x tokens\n"
            f"new weights: {self.pause_s * 1e3:.1f} ms, then the prefill of what runs\n"
            f"{self.describe_kv()}\n"
            f"{len(self.timings)} timings; the fit of the steps is off by {half:.1%} (median), {worst:.1%} (95 %)"
        )

    def describe_kv(self) -> str:
        if "kv_tokens" in self.cost.model_fields_set:
            return f"KV cache: {self.cost.kv_tokens:,} tokens"
        return "KV cache: the engine does not say how large; without cost.kv_tokens a simulated one is never full"

    def to_toml(self) -> str:
        """The sections of a scenario that say what was measured."""
        weights = {"pause_s": self.pause_s, "keep_kv": False}
        cost, engines = self.cost.model_dump(mode="json", exclude_unset=True), {"prefix_cache": self.prefix_cache}
        return tomli_w.dumps({"cost": cost, "engines": engines, "weights": weights})


def fit(timings: list[Timing], source: str, kv_tokens: int | None = None, prefix_cache: bool = True) -> Fit:
    """Least squares of the relative errors of decode steps and prefills together, with costs that are not negative.

    `kv_tokens`: capacity of the KV cache, as the engine says; `prefix_cache`: it keeps what it has handed back.
    """
    terms = [one.decode_terms() for one in timings] + [one.prefill_terms() for one in timings]
    seconds = [one.decode_s for one in timings] + [one.prefill_s for one in timings]
    costs = dict(zip(COSTS, least_squares(terms, seconds), strict=True))
    costs["decode_base_s"] = max(LEAST_S, costs["decode_base_s"])
    known = {} if kv_tokens is None else {"kv_tokens": kv_tokens}
    return Fit(EngineCost(source=source, **costs, **known), timings, prefix_cache)


def least_squares(terms: list[list[float]], seconds: list[float]) -> list[float]:
    """Coefficients >= 0 of the terms for which predicted over measured is nearest to 1, where any time was measured."""
    measured = np.array(seconds) > 0
    design = np.array(terms)[measured] / np.array(seconds)[measured, None]
    free = list(range(design.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(design[:, free], np.ones(len(design)), rcond=None)
        if (solved >= 0).all():
            break
        free.remove(free[int(np.argmin(solved))])
    found = dict(zip(free, solved.tolist(), strict=True))
    return [found.get(place, 0.0) for place in range(design.shape[1])]
