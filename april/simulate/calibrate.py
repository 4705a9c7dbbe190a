"""Fits the cost model to a real engine: timed decode steps, updates and prefills over running sequences and context."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import numpy as np
import tomli_w

from april.simulate.costs import EngineCost

CONTEXTS = (16, 128, 512)
"""tokens of each sequence when it is submitted"""
SHARES = (1 / 16, 1 / 4, 1 / 2, 1)
"""of the slots that have a sequence"""
REPEATS = 3
"""of which the median counts"""
LEAST_S = 1e-9
"""a is a cost, so that a fit that would make it negative puts it here"""


@dataclass(frozen=True)
class Timing:
    running: int
    kv: float
    """tokens in the cache, mean over the timed steps"""
    step_s: float
    admit_s: float | None
    """to take in one sequence more; None where all slots were in use"""
    pause_s: float
    """to take new weights in"""
    context: int
    """tokens of all sequences that were computed again after that"""
    prefill_s: float
    """which took so long"""


class Probe(Protocol):
    """An engine that can be asked for so many sequences with so much context."""

    slots: int
    longest_context: int
    """tokens with which a sequence may be submitted"""

    def time(self, running: int, context: int) -> Timing: ...


def measure(probe: Probe) -> list[Timing]:
    """Timings over a grid of running sequences and contexts."""
    counts = sorted({max(1, round(probe.slots * share)) for share in SHARES})
    probe.time(probe.slots, CONTEXTS[0])  # what is slow the first time
    return [
        middle([probe.time(running, context) for _ in range(REPEATS)])
        for context in CONTEXTS
        if context <= probe.longest_context
        for running in counts
    ]


def middle(timings: list[Timing]) -> Timing:
    """Medians of what was timed several times."""
    names = [name for name in ("step_s", "admit_s", "pause_s", "prefill_s") if getattr(timings[0], name) is not None]
    medians = {name: median(getattr(one, name) for one in timings) for name in names}
    return replace(timings[0], **medians)


@dataclass(frozen=True)
class Fit:
    cost: EngineCost
    timings: list[Timing]

    @property
    def errors(self) -> np.ndarray:
        """Predicted over measured step times, less 1."""
        predicted = [self.cost.steps_s(1, one.running, round(one.kv)) for one in self.timings]
        return np.array(predicted) / [one.step_s for one in self.timings] - 1

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
            f"{len(self.timings)} timings; the fit of the steps is off by {half:.1%} (median), {worst:.1%} (95 %)"
        )

    def to_toml(self) -> str:
        """The sections of a scenario that say what was measured."""
        weights = {"pause_s": self.pause_s, "keep_kv": False}
        return tomli_w.dumps({"cost": self.cost.model_dump(mode="json"), "weights": weights})


def fit(timings: list[Timing], source: str) -> Fit:
    """Least squares of the relative errors of steps and prefills, with costs that are not negative."""
    base_s, running_s, kv_s = least_squares(
        [[1.0, one.running, one.kv] for one in timings], [one.step_s for one in timings]
    )
    admit_s = median(one.admit_s for one in timings if one.admit_s is not None)
    prefills = [one for one in timings if one.prefill_s > admit_s]
    request_s, prefill_s = least_squares(
        [[one.running, one.context] for one in prefills], [one.prefill_s - admit_s for one in prefills]
    )
    cost = EngineCost(
        source=source, decode_base_s=max(LEAST_S, base_s), decode_running_s=running_s, decode_kv_s=kv_s,
        admit_s=admit_s, request_s=request_s, prefill_s=prefill_s,
    )  # fmt: skip
    return Fit(cost, timings)


def least_squares(terms: list[list[float]], seconds: list[float]) -> list[float]:
    """Coefficients >= 0 of the terms for which predicted over measured is nearest to 1."""
    design = np.array(terms) / np.array(seconds)[:, None]
    free = list(range(design.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(design[:, free], np.ones(len(design)), rcond=None)
        if (solved >= 0).all():
            break
        free.remove(free[int(np.argmin(solved))])
    found = dict(zip(free, solved.tolist(), strict=True))
    return [found.get(place, 0.0) for place in range(design.shape[1])]
