"""The schedule `april`, active partial rollouts (arXiv 2509.18521): a round opens N' > N groups and stops when N are
complete; the next round resumes the others first."""

from collections.abc import Mapping
from typing import Any

from april.broker.schedules.rounds import RoundSchedule
from april.broker.schedules.schedule import Dial
from april.config import ScheduleSection


class ActivePartialSchedule(RoundSchedule):
    dial = Dial("over_sampling_batch_size")

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        opened = {"over_sampling_batch_size": section.over_sampled}
        name = f"N' = {section.over_sampled}"
        return {
            name: opened,
            f"{name}, work dropped": opened | {"partial_rollout": False},
            f"{name}, overlap": opened | {"overlap": True},
        }
