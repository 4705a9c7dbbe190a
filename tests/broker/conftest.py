"""A broker without sockets, and a worker and a learner that have joined it."""

import pytest

from april import config as configuration
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, joined


@pytest.fixture
def converse(config_file):
    """Factory of brokers without sockets: converse(*overrides) -> Conversation of the small run's configuration."""
    return lambda *overrides: Conversation(configuration.load(config_file, list(overrides)))


@pytest.fixture
def talk(converse):
    return converse("--evaluation.prompts", "1")


@pytest.fixture
def worker(talk):
    return joined(FakeWorker(talk))


@pytest.fixture
def learner(talk):
    return joined(FakeLearner(talk))
