"""Fits the cost model to a real engine: timed decode steps over running sequences and KV tokens, timed prefills."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import tomli_w

from april.simulate.costs import EngineCost

CONTEXTS = (16, 64, 256, 1024)
"""tokens in KV of each sequence"""
STEPS = 24
"""decode steps timed together; the first few are left out"""
SKIPPED_STEPS = 4
REPEATS = 3
LEAST_S = 1e-9
"""a, b and c are costs, so that a fit that would make one negative puts it here"""


@dataclass(frozen=True)
class Timing:
    running: int
    kv: float
    """tokens in the cache, mean over the timed steps"""
    step_s: float
    prefill_s: float
    """for each token of context"""


class Probe(Protocol):
    """An engine that can be asked for so many sequences with so much context."""

    slots: int
    longest_context: int

    def time(self, running: int, context: int, steps: int) -> tuple[float, list[float]]:
        """(seconds of the prefill, seconds of each decode step after it)."""


class TorchProbe:
    """The embedded engine with a model's own weights."""

    def __init__(self, model: Path, slots: int):
        import torch

        from april.version import Version
        from april.workers.engines.torch_engine import TorchEngine, load_folder_weights

        torch.set_num_threads(1)
        self.slots = slots
        self.engine = TorchEngine(model, slots=slots, chunk_tokens=1 << 20, chunk_s=1e9, prefill_tokens=1 << 20)
        self.engine.load_weights(Version(0, 0), load_folder_weights(model))
        self.longest_context = self.engine.max_context
        self._next = 0

    def time(self, running: int, context: int, steps: int) -> tuple[float, list[float]]:
        from april.workers.engines.base import Request

        rng = np.random.default_rng(self._next)
        requests = []
        for _ in range(running):
            tokens = rng.integers(2, self.engine.shape.vocabulary, context).astype(np.int32)
            requests.append(Request(self._next, tokens, steps + 2, seed=self._next))
            self._next += 1
        for request in requests:
            self.engine.submit(request)
        marks = [time.perf_counter()]
        for _ in range(steps + 1):
            self.engine.step()
            marks.append(time.perf_counter())
        for request in requests:
            self.engine.cancel(request.id)
        took = np.diff(marks)
        return float(took[0]), took[1:].tolist()


def measure(probe: Probe) -> list[Timing]:
    """Median timings over a grid of running sequences and contexts."""
    timings = []
    counts = sorted({max(1, round(probe.slots * part)) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)})
    for context in (one for one in CONTEXTS if one + STEPS + 2 <= probe.longest_context):
        for running in counts:
            for _ in range(REPEATS):
                prefill_s, steps_s = probe.time(running, context, STEPS)
                step_s = float(np.median(steps_s[SKIPPED_STEPS:]))
                kv = running * (context + (STEPS + SKIPPED_STEPS) / 2)
                timings.append(Timing(running, kv, step_s, (prefill_s - step_s) / (running * context)))
    return timings


@dataclass(frozen=True)
class Fit:
    cost: EngineCost
    timings: list[Timing]

    @property
    def errors(self) -> np.ndarray:
        """Predicted over measured step times, less 1."""
        predicted = [self.cost.steps_s(1, one.running, round(one.kv)) for one in self.timings]
        return np.array(predicted) / [one.step_s for one in self.timings] - 1

    def describe(self) -> str:
        cost = self.cost
        median, worst = np.percentile(np.abs(self.errors), [50, 95])
        return (
            f"decode step = {cost.decode_base_s * 1e3:.3f} ms + {cost.decode_running_s * 1e6:.2f} us x running + "
            f"{cost.decode_kv_s * 1e9:.2f} ns x KV tokens; prefill {cost.prefill_s * 1e6:.2f} us a token\n"
            f"{len(self.timings)} timings; the fit is off by {median:.1%} (median), {worst:.1%} (95 %)"
        )

    def to_toml(self) -> str:
        """A [cost] section for a scenario."""
        return tomli_w.dumps({"cost": self.cost.model_dump(mode="json")})


def fit(timings: list[Timing], source: str) -> Fit:
    """Least squares of the relative errors of the steps, with costs that are not negative; median of the prefills."""
    step_s = np.array([one.step_s for one in timings])
    design = np.array([[1.0, one.running, one.kv] for one in timings]) / step_s[:, None]
    names = ["decode_base_s", "decode_running_s", "decode_kv_s"]
    free = [0, 1, 2]
    while True:
        solved, *_ = np.linalg.lstsq(design[:, free], np.ones(len(timings)), rcond=None)
        if (solved > 0).all() or len(free) == 1:
            break
        free.remove(free[int(np.argmin(solved))] if free[int(np.argmin(solved))] else free[-1])
    found = dict.fromkeys(names, 0.0) | {names[at]: float(value) for at, value in zip(free, solved, strict=True)}
    found["decode_base_s"] = max(LEAST_S, found["decode_base_s"])
    prefill_s = max(0.0, float(np.median([one.prefill_s for one in timings])))
    return Fit(EngineCost(source=source, prefill_s=prefill_s, **found), timings)
