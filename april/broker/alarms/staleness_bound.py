"""The alarm about a run whose tokens are so old that the staleness bound limits its pace."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


@shipped("staleness_bound")
class StalenessAlarm(Alarm):
    """Raised when more than 25 % of the tokens are as old as `schedule.max_staleness` permits, where it permits 2 steps
    or more."""

    steps_in_a_row = 3
    threshold = 0.25
    """Share of a batch's tokens as old as `schedule.max_staleness` permits, above which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        staleness = figures(record, "staleness")
        bound, by_age = staleness.get("bound", 0), staleness.get("tokens_by_age", {})
        at_bound = sum(tokens for age, tokens in by_age.items() if int(age) >= bound)
        share = at_bound / max(1, sum(by_age.values()))
        if bound < 2 or share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the tokens are as old as the bound of {bound} steps permits, and it sets the pace: start "
            "less at once (schedule.over_sampling_batch_size, schedule.in_flight), or raise schedule.max_staleness"
        )
