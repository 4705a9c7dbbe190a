"""The alarm on engines that do not sample from the weights they report: their log-probabilities differ from the
learner's."""

from typing import Any

from april.broker.telemetry.alarm import Alarm

PREFIX = "engine_gap_"
FIGURES = ("tokens", "mean", "largest", "age")
"""Figures of each worker in the learner's metrics, which are named PREFIX + FIGURE + _ + WORKER."""


Figures = dict[str, float]


def split_gaps(learner: Figures, step: int) -> tuple[dict[str, Figures], Figures]:
    """Split the learner's metrics of batch `step`: the figures of each worker, with the policy `step` they refer to,
    and the other metrics."""
    gaps: dict[str, Figures] = {}
    for name in learner:
        if name.startswith(PREFIX):
            figure, _, worker = name.removeprefix(PREFIX).partition("_")
            gaps.setdefault(worker, {})[figure] = learner[name]
    rest = {name: value for name, value in learner.items() if not name.startswith(PREFIX)}
    return {worker: described(gap, step) for worker, gap in gaps.items() if set(gap) == set(FIGURES)}, rest


def described(gap: Figures, step: int) -> Figures:
    tokens, age = int(gap["tokens"]), int(gap["age"])
    return {"step": step - age, "age": age, "tokens": tokens, "mean": gap["mean"], "largest": gap["largest"]}


class EngineGapAlarm(Alarm):
    page = "docs/learner.md#learner-and-engine-on-what-is-trained"
    threshold = 4.0
    """Largest allowed gap, as a multiple of the largest mean gap of any worker in the run's first batch."""
    least, most = 1e-4, 0.6
    """Bounds of the allowed gap, in nats: the weight check's bands of float32 and of 8-bit weights."""
    least_tokens = 100
    """Fewest tokens for which a worker's mean gap is judged."""

    def __init__(self) -> None:
        self.limit: float | None = None

    def look(self, record: dict[str, Any]) -> str:
        gaps = {
            worker: gap
            for worker, gap in (record.get("engine_gaps") or {}).items()
            if gap["age"] == 0 and gap["tokens"] >= self.least_tokens and gap["mean"] is not None
        }
        if not gaps:
            return ""
        furthest = max(gaps, key=lambda worker: gaps[worker]["mean"])
        mean, largest = gaps[furthest]["mean"], gaps[furthest]["largest"]
        if self.limit is None:
            self.limit = min(self.most, max(self.least, self.threshold * mean))
        if mean <= self.limit:
            return ""
        beyond = sum(gap["mean"] > self.limit for gap in gaps.values())
        return (
            f"what {furthest} sampled under the newest weights the learner sees with other probabilities than it said "
            f"({mean:.2g} apart in the mean, {largest:.2g} at most; up to {self.limit:.2g} are rounding; {beyond} of "
            f"{len(gaps)} workers): look whether its engine takes every update, and computes as the learner does"
        )
