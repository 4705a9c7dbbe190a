"""Alarms about how the run goes: what waits for what, and for how long that is possible."""

from collections import deque
from typing import Any

from april.broker.telemetry.alarm import Alarm
from april.broker.telemetry.in_a_row import InARow

FEWEST_LOOKS = 4
"""at the slots in a step, for their means to be believed"""


def waiting_share(record: dict[str, Any]) -> float:
    """Of the learner's time, that in which it waited for a batch."""
    learner = record.get("learner") or {}
    waited_s, trained_s = learner.get("wait_s") or 0.0, learner.get("train_s") or 0.0
    return waited_s / (waited_s + trained_s) if waited_s + trained_s else 0.0


def seen_slots(record: dict[str, Any]) -> dict[str, float]:
    """How full they were; nothing where there were none, or where a step was too short for a mean to say anything."""
    slots = record.get("slots") or {}
    return slots if slots.get("slots") and slots.get("looks", 0) >= FEWEST_LOOKS else {}


class StalenessBound(InARow):
    page = "docs/watching.md#alarms"
    threshold = 0.25
    """share of a batch's tokens that are as old as `schedule.max_staleness` permits, where it permits 2 or more"""

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


class StarvedEngines(InARow):
    page = "docs/watching.md#alarms"
    threshold = 0.2
    """share of the slots that were busy, while the learner waited for more than half of its time"""

    def wrong(self, record: dict[str, Any]) -> str:
        slots = seen_slots(record)
        if not slots or slots["busy"] >= self.threshold or waiting_share(record) <= 0.5:
            return ""
        return (
            f"only {slots['busy']:.0%} of {slots['slots']:.0f} slots were busy while the learner waited "
            f"{waiting_share(record):.0%} of the time: start more at once (schedule.over_sampling_batch_size, or "
            "a schedule.kind that goes on while the learner trains), or give fewer slots"
        )


class SaturatedEngines(InARow):
    page = "docs/watching.md#alarms"
    threshold = 8.0
    """samples that wait for each slot, all of which are busy, while the learner waited more than half of its time"""

    def wrong(self, record: dict[str, Any]) -> str:
        slots = seen_slots(record)
        if not slots or slots["busy"] < 0.95 or waiting_share(record) <= 0.5:
            return ""
        queue = slots["waiting"] / slots["slots"]
        if queue <= self.threshold:
            return ""
        return (
            f"{queue:.0f} samples wait for each of {slots['slots']:.0f} slots, which are all busy, and the learner "
            f"waits {waiting_share(record):.0%} of the time: add workers, or start less at once"
        )


class DiskFilling(Alarm):
    page = "docs/operations.md#what-to-do-when"
    threshold = 3600.0
    """seconds that are left at the pace of the last steps"""
    least_bytes = 2 << 30
    """free space below which the pace does not matter"""
    least_s = 60.0
    """over which the pace is measured"""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque(maxlen=20)

    def look(self, record: dict[str, Any]) -> str:
        free = record.get("disk_free_bytes")
        if free is None:
            return ""
        self.seen.append((record["time"], free))
        (began, before), left_s = self.seen[0], float("inf")
        if record["time"] - began >= self.least_s and free < before:
            left_s = free * (record["time"] - began) / (before - free)
        if left_s >= self.threshold and free >= self.least_bytes:
            return ""
        when = f", and is full in {left_s / 60:.0f} minutes at this pace" if left_s < self.threshold else ""
        return (
            f"the disk of the run folder has {free / 1e9:.1f} GB left{when}: make room, lower learner.checkpoint_every "
            "so that the journal is reclaimed sooner, or samples.max_mb"
        )
