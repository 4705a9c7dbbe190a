"""Tasks in several turns: what answers the policy between them. `docs/environments.md` shows how to write one."""

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
