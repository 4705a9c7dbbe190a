"""The alarm on engines that fail the weight check: they generate nothing, and their workers exit."""

from typing import Any

from april.broker.telemetry.alarm import Alarm


class WrongWeightsAlarm(Alarm):
    page = "docs/learner.md#proof-of-weights"
    threshold = 1
    """Failed weight checks since the last step; an engine counts once per attempt."""

    def look(self, record: dict[str, Any]) -> str:
        wrong = (record.get("learner") or {}).get("publish_wrong") or 0
        if wrong < self.threshold:
            return ""
        return (
            f"{wrong:g} times since the last step an engine did not hold the weights that it was sent, and got no "
            "work; read in the learner's log which and why, and mend the way of the weights into it"
        )
