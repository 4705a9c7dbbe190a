"""Fixtures with a random policy, whose turns end anywhere."""

import pytest

from april.learner.policy.arithmetic import build_model, save_policy
from tests.support.small_run import write_config
from tests.support.worker_and_broker import BrokerAndWorker

IN_TURNS = """
[environment]
name = "tests.support.environments:chain"
turn_ends = ["a", "b", "c", "d", "e", "f", "0", "1", "2"]
max_turn_tokens = 9

[reward]
name = "environment"
"""


@pytest.fixture(scope="session")
def babbling_policy(tmp_path_factory):
    """Random weights: every character is about as likely as any other."""
    folder = tmp_path_factory.mktemp("babbling")
    save_policy(build_model(hidden_size=64, layers=1, seed=0), folder)
    return folder


@pytest.fixture
def in_turns(tmp_path, babbling_policy, data_folder):
    """Configuration file of a small run with an environment."""
    path = write_config(tmp_path, babbling_policy, data_folder)
    path.write_text(path.read_text().replace("max_response_tokens = 24", "max_response_tokens = 48") + IN_TURNS)
    return path


@pytest.fixture
def make_run(in_turns, monkeypatch):
    """make_run(*overrides) -> BrokerAndWorker."""
    return lambda *overrides: BrokerAndWorker(in_turns, monkeypatch, overrides)
