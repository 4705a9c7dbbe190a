"""The alarm about engines that sample with other probabilities than the learner computes."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped
from april.weights.canary import EVIDENCE_LIMIT, SUSPECT, added_evidence


@shipped("engine_gap")
class EngineGapAlarm(Alarm):
    """Raised when the learner gives a worker's newest tokens other probabilities than the worker reported, so that its
    engine may not sample from the weights it should have."""

    page = "docs/learner.md#learner-and-engine-on-what-is-trained"
    threshold = 4.0
    """Largest allowed ratio of a worker's mean gap (difference between the log-probabilities of learner and worker) to
    the largest mean gap of any worker in the run's first batch. It is used if the learner has not measured the gap that
    rounding causes."""
    least, most = 1e-4, 0.6
    """Bounds in nats of the allowed mean gap that `threshold` yields: the gaps that the weight check allows an engine
    in float32 (`least`) and one in 8 bits (`most`)."""
    least_tokens = 100
    """Fewest tokens for which a worker's mean gap is judged."""

    def __init__(self) -> None:
        self.limit: float | None = None
        self.evidence: dict[str, float] = {}
        """Evidence that a worker has wrong weights, by worker: a CUSUM over steps, which `added_evidence` raises or
        lowers by the ratio of the worker's mean gap to the gap that rounding causes. Empty if the learner has not
        measured the latter."""
        self.raised_at: dict[str, float] = {}
        """By worker: the mean gap for which it last raised the alarm, as a multiple of the gap that rounding causes;
        from then on only larger gaps count as evidence. So an 8-bit engine, which rounds more than the learner has
        measured, raises the alarm once."""

    def look(self, record: dict[str, Any]) -> str:
        gaps = {
            worker: gap
            for worker, gap in figures(record, "engine_gaps").items()
            if gap["age"] == 0 and gap["tokens"] >= self.least_tokens and gap["mean"] is not None
        }
        if not gaps:
            return ""
        furthest = max(gaps, key=lambda worker: gaps[worker]["mean"])
        if rounding := figures(record, "learner").get("canary_rounding"):
            limit = SUSPECT * rounding
            self.evidence |= {
                worker: added_evidence(
                    self.evidence.get(worker, 0.0), gap["mean"] / rounding / self.raised_at.get(worker, 1.0)
                )
                for worker, gap in gaps.items()
            }
            beyond = [worker for worker in gaps if self.evidence[worker] > EVIDENCE_LIMIT]
            furthest = max(beyond, key=lambda worker: gaps[worker]["mean"], default=furthest)
            self.evidence |= dict.fromkeys(beyond, 0.0)
            self.raised_at |= {worker: max(1.0, gaps[worker]["mean"] / rounding) for worker in beyond}
        else:
            self.limit = self.limit or min(self.most, max(self.least, self.threshold * gaps[furthest]["mean"]))
            limit = self.limit
            beyond = [worker for worker, gap in gaps.items() if gap["mean"] > limit]
        if not beyond:
            return ""
        mean, largest = gaps[furthest]["mean"], gaps[furthest]["largest"]
        return (
            f"what {furthest} sampled under the newest weights the learner sees with other probabilities than it said "
            f"({mean:.2g} apart in the mean, {largest:.2g} at most; up to {limit:.2g} are rounding; {len(beyond)} of "
            f"{len(gaps)} workers): look whether its engine takes every update, and computes as the learner does"
        )
