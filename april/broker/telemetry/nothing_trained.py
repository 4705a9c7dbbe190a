"""The alarm on steps in which no sample has a gradient, because the rewards within every group are equal."""

from typing import Any

from april.broker.telemetry.alarm import Alarm


class NothingTrainedAlarm(Alarm):
    page = "docs/start/troubleshooting.md#it-learns-badly"
    threshold = 3
    """Steps in a row without a token that has a gradient."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def look(self, record: dict[str, Any]) -> str:
        share = (record.get("gradient") or {}).get("tokens")
        self.in_a_row = self.in_a_row + 1 if share == 0 else 0
        if self.in_a_row < self.threshold:
            return ""
        return (
            f"nothing was trained in the last {self.in_a_row} steps, since the rewards of every group were equal; read "
            "`april samples`, give easier or harder prompts, or a reward that tells responses apart"
        )
