"""A broker without sockets, and a worker and a learner that have joined it."""

import pytest

from april import config as configuration
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker


@pytest.fixture
def converse(config_file):
    """Factory of brokers without sockets: converse(*overrides) -> Conversation of the small run's configuration."""
    return lambda *overrides: Conversation(configuration.load(config_file, list(overrides)))


@pytest.fixture
def talk(converse):
    return converse("--evaluation.prompts", "1")


@pytest.fixture
def worker(talk):
    worker = FakeWorker(talk)
    worker.join()
    return worker


@pytest.fixture
def learner(talk):
    learner = FakeLearner(talk)
    learner.join()
    return learner
