"""The alarm about batches whose responses are shorter than those that were started."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


@shipped("length_bias")
class LengthBiasAlarm(Alarm):
    """Raised when lately trained responses have other lengths than created ones: the distance of the two distributions
    is above 1.5 times what chance explains."""

    page = "docs/operations.md#the-alarm-on-lengths"
    steps_in_a_row = 3
    threshold = 1.5
    """Distance between trained and created response lengths above which the alarm is raised, as a multiple of the
    largest distance that chance explains."""

    def look(self, record: dict[str, Any]) -> str:
        drift = figures(record, "lengths").get("drift")
        if not drift or drift["distance"] <= self.threshold * drift["band"]:
            return ""
        return (
            f"what is trained has other lengths than what is created (distance {drift['distance']:.2f}, by chance up "
            f"to {drift['band']:.2f}): look for what discards by length, a filter, a time limit of a verifier, or "
            "workers that die on long responses"
        )
