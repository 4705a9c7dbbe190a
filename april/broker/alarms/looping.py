"""The alarm about responses that repeat themselves."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


@shipped("looping")
class LoopingAlarm(Alarm):
    """Raised when more than 20 % of the responses end in a loop: at least 48 tokens, one stretch repeated four times or
    more (`looping_share`)."""

    steps_in_a_row = 3
    threshold = 0.2
    """Share of a batch's responses that end in a loop of repeated tokens, above which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        share = figures(record, "learner").get("looping_share") or 0.0
        if share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the responses end in a loop, the same tokens again and again: read "
            "`april samples --worst 5`; a higher sampling.temperature, a lower learner.lr, or a reward against loops"
        )
