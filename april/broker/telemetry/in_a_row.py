"""Base class of alarms about what may be chance in one step, but not in several steps in a row."""

from typing import Any

from april.broker.telemetry.alarm import Alarm


class ConsecutiveAlarm(Alarm):
    """Raised once `wrong` has returned a sentence for `steps` steps in a row; the newest sentence is shown."""

    steps = 3

    def __init__(self) -> None:
        self.in_a_row = 0

    def wrong(self, record: dict[str, Any]) -> str:
        """Check the record of a step; returns what is wrong and what to do, in one sentence, or "" if nothing is."""
        raise NotImplementedError

    def look(self, record: dict[str, Any]) -> str:
        sentence = self.wrong(record)
        self.in_a_row = self.in_a_row + 1 if sentence else 0
        return sentence if self.in_a_row >= self.steps else ""
