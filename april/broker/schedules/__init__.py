"""Registry of schedules. A schedule decides what is generated next and when groups make a batch; see `schedule.py`."""

from april.registry import Registry

SCHEDULES = Registry(
    "schedule.kind",
    "schedule",
    {
        "sync": "april.broker.schedules.sync:SyncSchedule",
        "april": "april.broker.schedules.active_partial:ActivePartialSchedule",
        "continuous": "april.broker.schedules.continuous:ContinuousSchedule",
    },
    base="april.broker.schedules.schedule:Schedule",
)
