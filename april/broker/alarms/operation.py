"""Alarms about a run's operation: its parts, the weights in the engines, the use of their slots, and the disk."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from april.broker.alarms.alarm import Alarm, figures, shipped
from april.weights.canary import EVIDENCE_LIMIT, SUSPECT, added_evidence

if TYPE_CHECKING:
    from april.broker.peers import PeerLoop

USUAL_STEPS, FEWEST_STEPS = 31, 3
"""Number of newest steps whose median duration is the usual one, and least number of steps for a median."""


@shipped("slow_part")
class SlowPartAlarm(Alarm):
    """Raised when a training step, or the stage that a part's main loop is in, takes ten times as long as usual."""

    page = "docs/operations.md#what-to-do-when"
    threshold = 10
    """Multiple of the usual duration above which a step or stage is slow."""
    least_s = 10.0
    """Duration in seconds below which nothing is slow."""

    def __init__(self) -> None:
        self.steps_s: deque[float] = deque(maxlen=USUAL_STEPS)

    def look(self, record: dict[str, Any]) -> str:
        took_s, before = figures(record, "learner").get("train_s") or 0.0, list(self.steps_s)
        self.steps_s.append(took_s)
        if len(before) < FEWEST_STEPS or not self._is_slow(took_s, median(before)):
            return ""
        return (
            f"training took {took_s:.0f} s where {median(before):.2g} s are usual; look what else the learner's "
            "machine does, and how long the longest responses have become"
        )

    def watch(self, loops: Sequence["PeerLoop"]) -> str:
        slow = [loop for loop in loops if loop.usual_s and self._is_slow(loop.for_s, loop.usual_s)]
        if not slow:
            return ""
        peer, position, for_s, usual_s = max(slow, key=lambda loop: loop.for_s)
        return (
            f"{peer} has been at {position!r} for {for_s:.0f} s where {usual_s:.2g} s are usual; read its log; it is "
            "ended and started again if it gets nowhere for the `hung_s` of its section"
        )

    def _is_slow(self, took_s: float, usual_s: float) -> bool:
        return took_s > max(self.least_s, self.threshold * usual_s)


@shipped("wrong_weights")
class WrongWeightsAlarm(Alarm):
    """Raised when an engine did not hold the weights that it was sent: it failed the weight check."""

    page = "docs/learner.md#proof-of-weights"

    def look(self, record: dict[str, Any]) -> str:
        wrong = figures(record, "learner").get("publish_wrong") or 0
        if wrong < 1:
            return ""
        return (
            f"{wrong:g} times since the last step an engine did not hold the weights that it was sent, and got no "
            "work; read in the learner's log which and why, and mend the way of the weights into it"
        )


@shipped("engine_gap")
class EngineGapAlarm(Alarm):
    """Raised when the learner gives a worker's newest tokens other probabilities than the worker reported, so that its
    engine may not sample from the weights it should have."""

    page = "docs/learner.md#learner-and-engine-on-what-is-trained"
    threshold = 4.0
    """Largest allowed mean gap if the learner has not measured the gap that rounding causes, as a multiple of the
    largest mean gap of any worker in the run's first batch."""
    least, most = 1e-4, 0.6
    """Bounds of the largest allowed gap in nats: what the weight check allows in float32 and in 8 bits."""
    least_tokens = 100
    """Fewest tokens for which a worker's mean gap is judged."""

    def __init__(self) -> None:
        self.limit: float | None = None
        self.evidence: dict[str, float] = {}
        """Evidence of wrong weights by worker: a CUSUM of log gap over rounding gap (`added_evidence`). Empty if the
        learner has not measured the gap that rounding causes."""
        self.raised_at: dict[str, float] = {}
        """Mean gap for which a worker last raised the alarm, as a multiple of the rounding gap; after that only larger
        gaps count as evidence. So an 8-bit engine, which rounds more than the learner has measured, raises it once."""

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


@shipped("staleness_bound")
class StalenessAlarm(Alarm):
    """Raised when more than 25 % of the tokens are as old as `schedule.max_staleness` permits, where it permits 2 steps
    or more."""

    steps_in_a_row = 3
    threshold = 0.25
    """Share of a batch's tokens as old as `schedule.max_staleness` permits, above which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        staleness = figures(record, "staleness")
        bound, by_age = staleness.get("bound", 0), staleness.get("tokens_by_age", {})
        at_bound = sum(tokens for age, tokens in by_age.items() if int(age) >= bound)
        share = at_bound / max(1, sum(by_age.values()))
        if bound < 2 or share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the tokens are as old as the bound of {bound} steps permits, and it sets the pace: start "
            "less at once (schedule.over_sampling_batch_size, schedule.in_flight), or raise schedule.max_staleness"
        )


FEWEST_LOOKS = 4
"""Fewest occupancy measurements of the slots in a step from which their mean is used."""


def slots_while_waiting(record: dict[str, Any]) -> tuple[dict[str, float], float]:
    """(occupancy of the workers' slots, share of its time that the learner waited for a batch) in a step in which that
    share is above a half; the occupancy is empty otherwise, without slots, or if the step was too short for a mean."""
    slots, learner = figures(record, "slots"), figures(record, "learner")
    waited_s, trained_s = learner.get("wait_s") or 0.0, learner.get("train_s") or 0.0
    share = waited_s / (waited_s + trained_s) if waited_s + trained_s else 0.0
    measured = slots.get("slots") and slots.get("looks", 0) >= FEWEST_LOOKS
    return slots if measured and share > 0.5 else {}, share


@shipped("starved_engines")
class StarvedEnginesAlarm(Alarm):
    """Raised when less than 20 % of the slots were busy, while the learner waited for more than half of its time; steps
    of less than a second are not judged."""

    steps_in_a_row = 3
    threshold = 0.2
    """Share of busy slots below which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        slots, waited = slots_while_waiting(record)
        if not slots or slots["busy"] >= self.threshold:
            return ""
        return (
            f"only {slots['busy']:.0%} of {slots['slots']:.0f} slots were busy while the learner waited "
            f"{waited:.0%} of the time: start more at once (schedule.over_sampling_batch_size, or a schedule.kind "
            "that goes on while the learner trains), or give fewer slots"
        )


@shipped("saturated_engines")
class SaturatedEnginesAlarm(Alarm):
    """Raised when all slots were busy, more than eight samples waited for each, and the learner waited for more than
    half of its time."""

    steps_in_a_row = 3
    threshold = 8.0
    """Number of waiting samples per slot above which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        slots, waited = slots_while_waiting(record)
        if not slots or slots["busy"] < 0.95 or slots["waiting"] <= self.threshold * slots["slots"]:
            return ""
        return (
            f"{slots['waiting'] / slots['slots']:.0f} samples wait for each of {slots['slots']:.0f} slots, which are "
            f"all busy, and the learner waits {waited:.0%} of the time: add workers, or start less at once"
        )


@shipped("disk_filling")
class DiskFillingAlarm(Alarm):
    """Raised when the run folder's disk has less than 2 GiB left, or is full within an hour at the pace of the last
    steps."""

    page = "docs/operations.md#what-to-do-when"
    threshold = 3600.0
    """Seconds until the disk is full, at the rate of the last steps, below which the alarm is raised."""
    least_bytes = 2 << 30
    """Free bytes on the disk below which the alarm is raised whatever the rate of disk use."""
    least_s = 60.0
    """Least seconds over which the rate of disk use is measured."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque(maxlen=20)

    def look(self, record: dict[str, Any]) -> str:
        free = record.get("disk_free_bytes")
        if free is None:
            return ""
        self.seen.append((record["time"], free))
        (began, free_before), remaining_s = self.seen[0], float("inf")
        if record["time"] - began >= self.least_s and free < free_before:
            remaining_s = free * (record["time"] - began) / (free_before - free)
        if remaining_s >= self.threshold and free >= self.least_bytes:
            return ""
        when = f", and is full in {remaining_s / 60:.0f} minutes at this pace" if remaining_s < self.threshold else ""
        return (
            f"the disk of the run folder has {free / 1e9:.1f} GB left{when}: make room, lower learner.checkpoint_every "
            "so that the journal is reclaimed sooner, or samples.max_mb"
        )
