"""The alarm about samples that wait for slots."""

from typing import Any

from april.broker.alarms.alarm import Alarm, shipped
from april.broker.alarms.starved_engines import slots_while_waiting


@shipped("saturated_engines")
class SaturatedEnginesAlarm(Alarm):
    """Raised when in a step at least 95 % of the slots were busy, more than eight samples waited for each slot, and the
    learner waited for more than half of its time."""

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
