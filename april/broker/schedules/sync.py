"""The schedule `sync`, the baseline: a round opens N groups and waits for all of them."""

from collections.abc import Mapping
from typing import Any

from april.broker.schedules import SCHEDULES
from april.broker.schedules.rounds import RoundSchedule
from april.config import ScheduleSection
from april.errors import refuse


class SyncSchedule(RoundSchedule):
    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        if section.groups_per_round > section.rollout_batch_size:
            able = SCHEDULES.names_where(lambda kind: kind.dial and kind.dial.key == "over_sampling_batch_size")
            refuse(
                "schedule.over_sampling_batch_size",
                section.groups_per_round,
                f"over-samples N = {section.rollout_batch_size}, which schedule.kind = {section.kind!r} never does",
                f"use schedule.kind = {able} or leave the key out",
            )
        super().check(section)

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """One variant with N groups in a batch, one with as many as over-sampling would open."""
        each = (section.rollout_batch_size, section.over_sampled)
        return {f"N = {groups}": {"rollout_batch_size": groups} for groups in each}
