"""Lets single calls fail in the processes that parts of a run start. With this folder on PYTHONPATH, Python imports
this file at its own start."""

import sys
from pathlib import Path

ROLES = {
    "april.broker.snapshots": "snapshot",
    "april.workers.rewards.process": "verifier",
    "april.agents.host": "program",
}
"""Module that a process runs -> what its part is called in the orders."""

if role := next((ROLES[word] for word in sys.orig_argv if word in ROLES), ""):
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.chaos import failing_calls

    failing_calls.install(role)
