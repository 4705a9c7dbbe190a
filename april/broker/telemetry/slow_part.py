"""The alarm on whatever takes ten times as long as usual: a training step, or one position of a main loop."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from april.broker.sessions import PeerLoop
from april.broker.telemetry.alarm import Alarm

STEPS, FIRST_STEPS = 31, 3
"""Newest steps whose median is the usual time, and fewest steps for a median."""


class SlowPartAlarm(Alarm):
    page = "docs/operations.md#what-to-do-when"
    threshold = 10
    """Factor by which a slow part exceeds its usual time."""
    least_s = 10.0
    """Seconds below which nothing is slow."""

    def __init__(self) -> None:
        self.steps_s: deque[float] = deque(maxlen=STEPS)

    def look(self, record: dict[str, Any]) -> str:
        took_s, before = (record.get("learner") or {}).get("train_s") or 0.0, list(self.steps_s)
        self.steps_s.append(took_s)
        if len(before) < FIRST_STEPS or not self._is_slow(took_s, median(before)):
            return ""
        return (
            f"training took {took_s:.0f} s where {median(before):.2g} s are usual; look what else the learner's "
            "machine does, and how long the longest responses have become"
        )

    def watch(self, loops: Sequence[PeerLoop]) -> str:
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
