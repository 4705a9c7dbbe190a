"""The alarm about engines that fail the weight check."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


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
