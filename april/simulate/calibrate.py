"""Fits the engine cost model to a real engine: decode steps at steady loads, prefills, and weight updates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import numpy as np
import tomli_w

from april.config.costs import EngineCost

LONGEST_RESPONSES = (64, 256, 1024)
"""The measured loads, by the longest response of each (tokens): at a load the response lengths are uniform from 1 to
it."""
RUNNING_SHARES = (1 / 16, 1 / 4, 1 / 2, 1)
"""The measured loads, by the number of running sequences of each, as a share of the engine's slots."""
REPEATS = 3
"""How often each load is timed; of each measured duration the median over these timings is used."""
MIN_BASE_S = 1e-9
"""Lower limit of the fitted `decode_base_s`, which must be positive."""


@dataclass(frozen=True)
class Timing:
    """Timing of an engine at one load: first of decode steps, in which a sequence that ends is replaced at once, then
    of a weight update, then of the prefill that follows it."""

    running: int
    """Number of running sequences."""
    steps: float
    """Number of decode steps that were timed."""
    kv: float
    """Tokens in the KV cache, mean over the decode steps."""
    admissions: int
    """Number of decode steps that began with the admission of new sequences."""
    admitted: int
    """Number of sequences admitted."""
    admitted_tokens: int
    """Context tokens of the admitted sequences."""
    decode_s: float
    """Duration of the decode steps and admissions (seconds)."""
    pause_s: float
    """Duration of the weight update (seconds)."""
    context: int
    """Context tokens of all sequences, prefilled again after the update."""
    prefill_s: float
    """Duration of the prefill after the weight update (seconds)."""

    def decode_terms(self) -> list[float]:
        """Coefficients of the `EngineCost` fields in the predicted `decode_s`, in the order of `COSTS`."""
        steps = [self.steps, self.steps * self.running, self.steps * self.kv]
        return [*steps, self.admissions, self.admitted, self.admitted_tokens]

    def prefill_terms(self) -> list[float]:
        """Coefficients of the `EngineCost` fields in the predicted `prefill_s`, in the order of `COSTS`."""
        return [0, 0, 0, 1, self.running, self.context]


COSTS = ("decode_base_s", "decode_running_s", "decode_kv_s", "admit_s", "request_s", "prefill_s")


class Probe(Protocol):
    """An engine whose decode steps, prefills and weight updates can be timed at a given load."""

    slots: int
    longest_response: int

    def time(self, running: int, longest: int) -> Timing:
        """Measure a load of `running` sequences with responses of 1 to `longest` tokens; always the same sequences."""


def measure(
    probe: Probe,
    longest_responses: Sequence[int] = LONGEST_RESPONSES,
    shares: Sequence[float] = RUNNING_SHARES,
    repeats: int = REPEATS,
) -> list[Timing]:
    """Measure a grid of loads: each number of running sequences (`shares` of the engine's slots) with each longest
    response (tokens). Each load is timed `repeats` times. Returns one timing per load, with the median durations."""
    counts = sorted({max(1, round(probe.slots * share)) for share in shares})
    probe.time(probe.slots, min(longest_responses[0], probe.longest_response))  # warm-up
    return [
        median_timing([probe.time(running, longest) for _ in range(repeats)])
        for longest in sorted({min(longest, probe.longest_response) for longest in longest_responses})
        for running in counts
    ]


def median_timing(timings: list[Timing]) -> Timing:
    """One timing with the median durations of several timings of the same load."""
    medians = {
        name: median(getattr(timing, name) for timing in timings) for name in ("decode_s", "pause_s", "prefill_s")
    }
    return replace(timings[0], **medians)


@dataclass(frozen=True)
class Fit:
    cost: EngineCost
    timings: list[Timing]
    prefix_cache: bool = True
    """Whether the engine keeps the KV cache of sequences that were taken out of it unfinished, so that it can resume
    them."""

    @property
    def errors(self) -> np.ndarray:
        """Relative error of the predicted duration of decode steps, for each timing (predicted / measured - 1)."""
        costs = [getattr(self.cost, name) for name in COSTS]
        return np.array([np.dot(timing.decode_terms(), costs) / timing.decode_s for timing in self.timings]) - 1

    @property
    def pause_s(self) -> float:
        """Pause of the engine during a weight update, at the largest number of running sequences that was measured,
        without the prefill after it (seconds, median)."""
        most = max(timing.running for timing in self.timings)
        return median(timing.pause_s for timing in self.timings if timing.running == most)

    def describe(self) -> str:
        cost = self.cost
        half, worst = np.percentile(np.abs(self.errors), [50, 95])
        return (
            f"decode step = {cost.decode_base_s * 1e3:.3f} ms + {cost.decode_running_s * 1e6:.2f} us x running + "
            f"{cost.decode_kv_s * 1e9:.2f} ns x KV tokens\n"
            f"prefill = {cost.admit_s * 1e3:.3f} ms + {cost.request_s * 1e3:.3f} ms x sequences + "
            f"{cost.prefill_s * 1e6:.2f} us x tokens\n"
            f"new weights: {self.pause_s * 1e3:.1f} ms, then the prefill of the running sequences\n"
            f"{self.describe_kv()}\n"
            f"{len(self.timings)} timings; the fit of the steps is off by {half:.1%} (median), {worst:.1%} (95 %)"
        )

    def describe_kv(self) -> str:
        if "kv_tokens" in self.cost.model_fields_set:
            return f"KV cache: {self.cost.kv_tokens:,} tokens"
        return "KV cache: the engine does not say how large; without cost.kv_tokens a simulated one is never full"

    def to_toml(self) -> str:
        """The measured costs as TOML: the sections [cost], [engines] and [weights] of a scenario."""
        weights = {"pause_s": self.pause_s, "keep_kv": False}
        cost, engines = self.cost.model_dump(mode="json", exclude_unset=True), {"prefix_cache": self.prefix_cache}
        return tomli_w.dumps({"cost": cost, "engines": engines, "weights": weights})


def fit(timings: list[Timing], source: str, kv_tokens: int | None = None, prefix_cache: bool = True) -> Fit:
    """Fit non-negative costs by least squares over the relative errors of decode steps and prefills together.

    `source`: text that says which engine was measured; `kv_tokens`: capacity of the engine's KV cache in tokens, None
    if unknown; `prefix_cache`: whether the engine keeps the KV cache of sequences that were taken out of it unfinished.
    """
    terms = [timing.decode_terms() for timing in timings] + [timing.prefill_terms() for timing in timings]
    seconds = [timing.decode_s for timing in timings] + [timing.prefill_s for timing in timings]
    costs = dict(zip(COSTS, least_squares(terms, seconds), strict=True))
    costs["decode_base_s"] = max(MIN_BASE_S, costs["decode_base_s"])
    known = {} if kv_tokens is None else {"kv_tokens": kv_tokens}
    return Fit(EngineCost(source=source, **costs, **known), timings, prefix_cache)


def least_squares(terms: list[list[float]], seconds: list[float]) -> list[float]:
    """Coefficients >= 0 for which terms @ coefficients / seconds is nearest to 1; rows of 0 s are left out."""
    measured = np.array(seconds) > 0
    design = np.array(terms)[measured] / np.array(seconds)[measured, None]
    free = list(range(design.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(design[:, free], np.ones(len(design)), rcond=None)
        if (solved >= 0).all():
            break
        free.remove(free[int(np.argmin(solved))])
    found = dict(zip(free, solved.tolist(), strict=True))
    return [found.get(index, 0.0) for index in range(design.shape[1])]
