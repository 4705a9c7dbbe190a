"""Agents: programs of one's own that speak with the policy over HTTP, durably. `docs/agents.md` shows how."""

from april.registry import Registry

PROGRAMS = Registry(
    "agent.program",
    "agent",
    {"gymnasium": "april.agents.gymnasium:Gymnasium", "verifiers": "april.agents.verifiers:Verifiers"},
)
