"""The alarm about a training step, or a stage of a process's main loop, that takes much longer than usual."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from april.broker.alarms.alarm import Alarm, figures, shipped

if TYPE_CHECKING:
    from april.broker.peers import PeerLoop


USUAL_STEPS, FEWEST_STEPS = 31, 3
"""Number of newest steps whose median duration counts as usual, and number of steps from which on there is a median."""


@shipped("slow_part")
class SlowPartAlarm(Alarm):
    """Raised when a training step, or the stage that a part's main loop is in, takes ten times as long as usual."""

    page = "docs/operations.md#what-to-do-when"
    threshold = 10
    """Multiple of the usual duration above which a step or stage is slow."""
    least_s = 10.0
    """Duration in seconds up to which no step and no stage counts as slow."""

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
