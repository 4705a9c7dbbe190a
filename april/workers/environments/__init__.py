"""Environments for tasks of several turns: functions that answer the policy between its turns.

`docs/environments.md` shows how to write one.
"""

from april.util.registry import Registry
from april.workers.environments.base import EnvironmentTurn, Observation

ENVIRONMENTS = Registry(
    "environment.name",
    "environment",
    {
        "calculator": "april.workers.environments.calculator:calculator",
        "scratchpad": "april.workers.environments.calculator:scratchpad",
    },
)

__all__ = ["ENVIRONMENTS", "EnvironmentTurn", "Observation"]
