"""Agents: programs of one's own that speak with the policy over HTTP, durably. `docs/agents.md` shows how."""

from april.registry import Registry

PROGRAMS = Registry("agent.program", "agent", {"verifiers": "april.agents.verifiers:Verifiers"})
