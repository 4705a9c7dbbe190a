"""A worker whose engine takes longer for one step than a session may be silent, and a broker's real process."""

import time
import uuid

import numpy as np
import pytest

from april import config as configuration
from april.wire.message import Version
from april.wire.sockets.broker import BrokerConnection
from april.workers.engines.base import Chunk
from april.workers.worker import Worker
from tests.support.page_client import Client

SILENCE_S = 3.0


class SlowEngine:
    """Engine with three tokens per request, after one step that takes long."""

    version, capacity, queued = Version(0, 0), 4, 0

    def __init__(self):
        self.requests, self.generated_tokens = [], 0

    @property
    def live(self):
        return len(self.requests)

    def submit(self, request):
        self.requests.append(request.id)

    def step(self):
        if not self.requests:
            return []
        time.sleep(2 * SILENCE_S)
        ended, self.requests = self.requests, []
        self.generated_tokens += 3 * len(ended)
        return [Chunk(id, np.arange(3, dtype="i4"), np.zeros(3, "f4"), self.version, "stop") for id in ended]

    def failures(self):
        return []

    def cancel(self, request_id):
        return []

    def cancel_all(self, request_ids):
        return []


@pytest.mark.full
def test_a_long_decode_step_costs_no_leases(start_broker, config_file):
    overrides = ["--reward.where", "scorer", "--broker.session_timeout_s", str(SILENCE_S), "--broker.renew_s", "0.5"]
    broker, engine = start_broker(*overrides, "--broker.lease_s", "4"), SlowEngine()
    address = broker.address
    learner = Client(address, "learner", "raw-learner")
    worker = Worker(
        configuration.load(config_file, overrides[:2]),
        engine,
        BrokerConnection(address, "worker", "w", uuid.uuid4().hex, patience_s=60.0),
        [],
    )
    try:
        learner.hello()
        learner.ask("LearnerAdmitted", "StartLearner", 0, "tcp://127.0.0.1:9")
        worker._say_hello()
        deadline = time.monotonic() + 60
        while worker.acknowledged_tokens < 6:
            worker.run_once()
            assert time.monotonic() < deadline, broker.output
        assert "is lost" not in broker.output and "refused" not in broker.output
    finally:
        worker.connection.close()
        learner.close()
