"""`sync`: a round opens N groups and waits for all of them. The baseline that others are compared with."""

from collections.abc import Mapping
from typing import Any

from april.broker.schedules import SCHEDULES
from april.broker.schedules.rounds import RoundSchedule
from april.config import ConfigError, ScheduleSection


class SyncSchedule(RoundSchedule):
    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        if section.groups_per_round > section.rollout_batch_size:
            able = SCHEDULES.those(lambda kind: kind.dial and kind.dial.key == "over_sampling_batch_size")
            raise ConfigError(
                f"key 'schedule.over_sampling_batch_size' = {section.groups_per_round} over-samples N = "
                f"{section.rollout_batch_size}, which schedule.kind = {section.kind!r} never does; use schedule.kind = "
                f"{able} or leave the key out"
            )
        super().check(section)

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """Also with as many groups as over-sampling opens."""
        each = (section.rollout_batch_size, section.over_sampled)
        return {f"N = {groups}": {"rollout_batch_size": groups} for groups in each}
