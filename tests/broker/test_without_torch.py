"""The broker can be installed and run without torch."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = """
import sys
sys.modules["torch"] = None                      # importing it raises ImportError
from april import config
from april.broker.server import Server
server = Server(config.load(sys.argv[1]))
server.serve_once()
server.close()
print(server.service.ledger.rounds.number, len(server.service.ledger.open_groups()))
"""


@pytest.mark.full
def test_a_broker_starts_a_round_without_torch(config_file):
    done = subprocess.run([sys.executable, "-c", SCRIPT, config_file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "6"]


def test_torch_is_no_dependency_of_the_core():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert not any(requirement.startswith(("torch", "sglang", "matplotlib")) for requirement in project["dependencies"])
