"""An alarm about what may be chance in one step, and is none in several steps on end."""

from typing import Any

from april.broker.telemetry.alarm import Alarm


class InARow(Alarm):
    """Raised from the `steps`-th step on, in a row, for which `wrong` has a sentence; that of the newest is said."""

    steps = 3

    def __init__(self) -> None:
        self.in_a_row = 0

    def wrong(self, record: dict[str, Any]) -> str:
        """What is wrong with a step, as `Alarm.look` says it; or nothing."""
        raise NotImplementedError

    def look(self, record: dict[str, Any]) -> str:
        sentence = self.wrong(record)
        self.in_a_row = self.in_a_row + 1 if sentence else 0
        return sentence if self.in_a_row >= self.steps else ""
