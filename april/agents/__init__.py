"""Agents: the user's programs, which call the policy over HTTP in durable sessions. See `docs/agents.md`."""

from april.util.registry import Registry

PROGRAMS = Registry(
    "agent.program",
    "agent",
    {"gymnasium": "april.agents.gymnasium:Gymnasium", "verifiers": "april.agents.verifiers_package:Verifiers"},
)
