"""Tasks in several turns: what answers the policy between them. `docs/environments.md` shows how to write one."""

from april.environments.base import EnvironmentTurn, Observation
from april.registry import Registry

ENVIRONMENTS = Registry(
    "environment.name",
    "environment",
    {
        "calculator": "april.environments.calculator:calculator",
        "scratchpad": "april.environments.calculator:scratchpad",
    },
)

__all__ = ["ENVIRONMENTS", "EnvironmentTurn", "Observation"]
