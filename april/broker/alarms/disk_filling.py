"""The alarm about the disk of the run's folder."""

from collections import deque
from typing import Any

from april.broker.alarms.alarm import Alarm, shipped


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
    """Shortest stretch of newest steps, in seconds, from which the rate of disk use is computed."""

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
