"""Registry of schedules. A schedule decides what is generated next and when groups make a batch; see `schedule.py`."""

from april.util.registry import Registry

SCHEDULES = Registry(
    "schedule.kind",
    "schedule",
    {
        "sync": "april.broker.schedules.rounds:SyncSchedule",
        "april": "april.broker.schedules.rounds:ActivePartialSchedule",
        "continuous": "april.broker.schedules.continuous:ContinuousSchedule",
    },
    base="april.broker.schedules.schedule:Schedule",
)
