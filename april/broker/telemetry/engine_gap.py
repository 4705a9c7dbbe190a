"""The alarm against engines whose samples are not of the weights they name: the learner sees their tokens otherwise."""

from typing import Any

from april.broker.telemetry.alarm import Alarm

PREFIX = "engine_gap_"
FIGURES = ("tokens", "mean", "largest", "age")
"""of a learner's metrics, which are named PREFIX + FIGURE + _ + WORKER"""


Figures = dict[str, float]


def split_gaps(learner: Figures, step: int) -> tuple[dict[str, Figures], Figures]:
    """The metrics of batch `step` as FIGURES of each worker, with the `step` of the version that they are of, and the
    rest of the metrics."""
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


class EngineGap(Alarm):
    page = "docs/learner.md#learner-and-engine-on-what-is-trained"
    threshold = 4.0
    """times the mean of the run's first batch, of the worker that was furthest from the learner there"""
    least, most = 1e-4, 0.6
    """nats, within which that lies: the canary's bands of float32, and of 8 bits"""
    least_tokens = 100

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
