"""Tasks in several turns: what answers the policy between them. `docs/environments.md` shows how to write one."""

from april.environments.base import Observation, Turn

__all__ = ["Observation", "Turn"]
