"""Alarms about a run's operation: what waits for what, and how long the disk lasts."""

from collections import deque
from typing import Any

from april.broker.telemetry.alarm import Alarm
from april.broker.telemetry.in_a_row import ConsecutiveAlarm

FEWEST_LOOKS = 4
"""Fewest measurements of the slots in a step for which their means are used."""


def waiting_share(record: dict[str, Any]) -> float:
    """Share of the learner's time in which it waited for a batch."""
    learner = record.get("learner") or {}
    waited_s, trained_s = learner.get("wait_s") or 0.0, learner.get("train_s") or 0.0
    return waited_s / (waited_s + trained_s) if waited_s + trained_s else 0.0


def measured_slots(record: dict[str, Any]) -> dict[str, float]:
    """Occupancy of the slots; empty if there were none, or if the step was too short for a mean."""
    slots = record.get("slots") or {}
    return slots if slots.get("slots") and slots.get("looks", 0) >= FEWEST_LOOKS else {}


class StalenessAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.25
    """Share of a batch's tokens as old as `schedule.max_staleness` permits, where it permits 2 or more."""

    def wrong(self, record: dict[str, Any]) -> str:
        staleness = record.get("staleness") or {}
        bound, by_age = staleness.get("bound", 0), staleness.get("tokens_by_age", {})
        at_bound = sum(tokens for age, tokens in by_age.items() if int(age) >= bound)
        share = at_bound / max(1, sum(by_age.values()))
        if bound < 2 or share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the tokens are as old as the bound of {bound} steps permits, and it sets the pace: start "
            "less at once (schedule.over_sampling_batch_size, schedule.in_flight), or raise schedule.max_staleness"
        )


class StarvedEnginesAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.2
    """Share of busy slots, below which the alarm is raised if the learner waited for more than half of its time."""

    def wrong(self, record: dict[str, Any]) -> str:
        slots = measured_slots(record)
        if not slots or slots["busy"] >= self.threshold or waiting_share(record) <= 0.5:
            return ""
        return (
            f"only {slots['busy']:.0%} of {slots['slots']:.0f} slots were busy while the learner waited "
            f"{waiting_share(record):.0%} of the time: start more at once (schedule.over_sampling_batch_size, or "
            "a schedule.kind that goes on while the learner trains), or give fewer slots"
        )


class SaturatedEnginesAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 8.0
    """Samples waiting per slot, if all slots are busy and the learner waited for more than half of its time."""

    def wrong(self, record: dict[str, Any]) -> str:
        slots = measured_slots(record)
        if not slots or slots["busy"] < 0.95 or waiting_share(record) <= 0.5:
            return ""
        queue = slots["waiting"] / slots["slots"]
        if queue <= self.threshold:
            return ""
        return (
            f"{queue:.0f} samples wait for each of {slots['slots']:.0f} slots, which are all busy, and the learner "
            f"waits {waiting_share(record):.0%} of the time: add workers, or start less at once"
        )


class DiskFillingAlarm(Alarm):
    page = "docs/operations.md#what-to-do-when"
    threshold = 3600.0
    """Seconds until the disk is full, at the rate of the last steps."""
    least_bytes = 2 << 30
    """Free bytes below which the alarm is raised at any rate."""
    least_s = 60.0
    """Least seconds over which the rate is measured."""

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
