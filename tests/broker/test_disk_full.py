"""A broker without room on its disk acknowledges nothing, answers questions, and goes on when there is room again."""

import resource
import time
import uuid

import orjson
import pytest

from april import wire
from april.client import BrokerConnection, BrokerUnreachable
from april.version import Version
from tests.broker.conversation import chunk_arrays
from tests.run.processes import APRIL, Job, wait_until


@pytest.fixture
def broker(config_file, tmp_path):
    job = Job([*APRIL, "broker", str(config_file)], tmp_path / "broker.log")
    job.run_dir = tmp_path / "runs" / "small"
    wait_until((job.run_dir / "address").exists, job)
    job.address = (job.run_dir / "address").read_text()
    yield job
    job.end()


@pytest.fixture
def join(broker):
    connections = []

    def start(role):
        connection = BrokerConnection(broker.address, role, role, uuid.uuid4().hex, patience_s=60.0)
        connection.hello([])
        connections.append(connection)
        return connection

    yield start
    for connection in connections:
        connection.close()


def wait_for(connection, kind, timeout_s=60.0):
    """The next message of a kind; heartbeats meanwhile."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        connection.beat()
        for received in connection.receive(timeout_ms=200):
            if isinstance(received.message, kind):
                return received
    raise AssertionError(f"no {kind.__name__}")


def limit_files(job, size):
    """No file of the process may grow beyond `size` bytes."""
    _, hard = resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def test_a_full_disk_costs_nothing_that_was_acknowledged_and_ends_by_itself(broker, join):
    learner, worker, monitor = join("learner"), join("worker"), join("monitor")
    assert isinstance(learner.request(wire.LearnerStart(0, "tcp://127.0.0.1:9"), 10.0).message, wire.LearnerStarted)
    worker.send(wire.Holding(Version(0, 0), 4))
    grant = wait_for(worker, wire.Grant).message
    worker.send(wire.Chunk(grant.token, 0, Version(0, 0)), chunk_arrays(0, 3))
    assert wait_for(worker, wire.Acknowledged).message.lengths == [(grant.token, 3)]

    limit_files(broker, sum(path.stat().st_size for path in (broker.run_dir / "journal").glob("*.msgpack")))
    worker.send(wire.Chunk(grant.token, 3, Version(0, 0)), chunk_arrays(3, 2))
    status = orjson.loads(bytes(monitor.request(wire.StatusRequest(), 10.0).arrays[0]))
    while status["state"] != "read only":
        status = orjson.loads(bytes(monitor.request(wire.StatusRequest(), 10.0).arrays[0]))
    assert "cannot be written" in status["read_only"] and "READ ONLY" in broker.output
    assert isinstance(wait_for(worker, wire.Renewed).message, wire.Renewed), "peers learn that the broker lives"
    with pytest.raises(BrokerUnreachable):
        BrokerConnection(broker.address, "worker", "late", uuid.uuid4().hex, patience_s=60.0).hello([], timeout_s=1.0)

    limit_files(broker, None)
    assert "unknown session" in wait_for(worker, wire.Refused).message.reason
    welcome = worker.hello([grant.token], acknowledged_tokens=3)
    assert (welcome.epoch, welcome.lost) == (2, [])
    worker.send(wire.Chunk(grant.token, 3, Version(0, 0)), chunk_arrays(3, 2))
    assert (grant.token, 5) in wait_for(worker, wire.Acknowledged).message.lengths
    monitor.hello([])
    status = orjson.loads(bytes(monitor.request(wire.StatusRequest(), 10.0).arrays[0]))
    assert (status["state"], status["read_only"], status["ledger_closed"]) == ("running", "", True)
