"""The alarm about steps without a gradient."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


@shipped("nothing_trained")
class NothingTrainedAlarm(Alarm):
    """Raised when no group had a spread of rewards, so that nothing had a gradient."""

    page = "docs/start/troubleshooting.md#it-learns-badly"
    steps_in_a_row = 3

    def look(self, record: dict[str, Any]) -> str:
        if figures(record, "gradient").get("tokens") != 0:
            return ""
        return (
            f"nothing was trained in the last {self.steps_in_a_row} steps, since the rewards of every group were "
            "equal; read `april samples`, give easier or harder prompts, or a reward that tells responses apart"
        )
