"""The broker sends an answer only after the disk sync that covers it, also while it already handles the next
messages."""

import os
import signal
import socket
import threading
import time
import uuid
from contextlib import closing

import pytest

from april import wire
from april.broker import server as module
from april.broker.server import HTTP_FILE, OUTBOX_MESSAGES, BindError, Server
from april.broker.views.status import read_status
from april.config import load
from april.util import clock
from april.util.lifetime import STEP_ASIDE
from april.wire.message import Version
from april.wire.security import keygen
from april.wire.sockets import base
from april.wire.sockets.base import ADDRESS_FILE
from april.wire.sockets.broker import BrokerConnection
from tests.support.broker_conversation import one_row


class HeldBack:
    """Replacement of `os.fdatasync` that waits until the test permits the sync."""

    def __init__(self, monkeypatch):
        self.permitted, self.waiting = threading.Event(), threading.Event()
        self.permitted.set()
        self.real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, file):
        self.waiting.set()
        assert self.permitted.wait(60.0)
        self.real(file)


@pytest.fixture
def server(config_file, request):
    server = Server(load(config_file, getattr(request, "param", [])))
    yield server
    server.close()


@pytest.fixture
def connect(server):
    connections = []

    def start(role):
        connection = BrokerConnection(server.address, role, role, uuid.uuid4().hex)
        connections.append(connection)
        connection.send(wire.Hello(role, role, connection.uid))
        connection.begin(exchange(server, connection, wire.Welcome).message)
        return connection

    yield start
    for connection in connections:
        connection.close()


def exchange(server, connection, kind):
    """Run the server until the peer has received a message of type `kind`, and return it."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        server.serve_once()
        for received in connection.receive():
            if isinstance(received.message, kind):
                return received
    raise AssertionError(f"no {kind.__name__}")


def take_chunks(server, count):
    """Take `count` reports of chunks from the server's socket unhandled; all other messages are handled. Returns their
    (route, frames)."""
    chunks, deadline = [], time.monotonic() + 60.0
    while len(chunks) < count:
        assert time.monotonic() < deadline, f"{len(chunks)} of {count} chunks"
        if server.socket.poll(100):
            route, *frames = base.receive(server.socket)
            if isinstance(wire.decode(frames).message, wire.Report):
                chunks.append((route.bytes, frames))
            else:
                server.service.handle(route.bytes, frames, clock.now())
    return chunks


def chunks_acknowledged(server):
    """Number of chunks that the broker's status shows as accepted."""
    return sum(read_status(server.service.context, clock.now()).accepted["chunks"].values())


def test_messages_during_a_sync_are_handled_and_acknowledged_after_their_own_sync(server, connect, monkeypatch):
    learner, worker = connect("learner"), connect("worker")
    learner.send(wire.StartLearner(0, "tcp://127.0.0.1:9"))
    exchange(server, learner, wire.LearnerAdmitted)
    worker.send(wire.WorkerCapacity(Version(0, 0), 4))
    [grant, *_] = exchange(server, worker, wire.Grants).message.grants
    disk = HeldBack(monkeypatch)
    for start in range(4):
        worker.send(*one_row(grant.lease_id, start, 1))
    chunks, has_message = take_chunks(server, 4), base.has_message

    def handle_one(server):
        """Replacement of the method that handles all waiting messages: handles one, so that others still wait."""
        server.service.handle(*chunks.pop(0), clock.now())
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Server, "_drain", handle_one)
        patch.setattr(
            base, "has_message", lambda socket: bool(chunks) if socket is server.socket else has_message(socket)
        )
        disk.permitted.clear()
        server.serve_once()
        assert server.journal.syncing and disk.waiting.wait(60.0)
        turning = threading.Thread(target=server.serve_once)
        turning.start()
        sample = server.service.ledger.leases[grant.lease_id].sample
        deadline = time.monotonic() + 60.0
        while sample.length < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sample.length == 2, "the second chunk is handled while the first is on its way to the disk"
        assert not any(isinstance(received.message, wire.Answers) for received in worker.receive(200))
        assert chunks_acknowledged(server) == 0
        disk.permitted.set()
        turning.join()
        while chunks:
            server.serve_once()
    acknowledged = exchange(server, worker, wire.Answers).message.acks
    while acknowledged[-1] != (grant.lease_id, 4):
        acknowledged += exchange(server, worker, wire.Answers).message.acks
    assert acknowledged == sorted(set(acknowledged))
    assert chunks_acknowledged(server) == 4


@pytest.mark.full
@pytest.mark.parametrize("server", [["--broker.session_timeout_s", "2"]], ids=["silent for 2 s"], indirect=True)
def test_a_worker_that_never_reads_loses_its_session_before_the_broker_its_memory(server, connect):
    worker = connect("worker")
    for lease_id in range(20_000):
        worker.send(wire.Report([wire.Scored(lease_id, [1.0], [{}])]))
        if lease_id % 100 == 0:
            server.serve_once()
            while server.inbox.has_message:  # a drain has some milliseconds, which a busy machine shortens
                server.serve_once()
            assert sum(map(len, server._outboxes.values())) <= OUTBOX_MESSAGES
    worker.forget()
    deadline = time.monotonic() + 60.0
    while server.service.peers.by_id and time.monotonic() < deadline:
        server.serve_once()
    assert not server.service.peers.by_id
    assert not server._outboxes or sum(map(len, server._outboxes.values())) <= OUTBOX_MESSAGES


def test_the_end_of_a_sync_wakes_the_broker_once(server):
    os.eventfd_write(server._synced, 1)
    server._wait(100)
    assert not server._poller.poll(0)


def test_a_broker_that_is_told_to_step_aside_stops_nobody(server, connect):
    connect("worker")
    server._on_signal(STEP_ASIDE, None)
    server.serve_once()
    assert server.steps_aside and not server.service.run.over and not server.service.ledger.rounds.draining


def test_a_broker_whose_address_is_in_the_run_folder_handles_signals(config_file, monkeypatch):
    found, write = [], module.replace_file

    def too_early(*_):
        raise AssertionError("a signal would have killed it")

    def write_and_tell(path, data):
        write(path, data)
        if path.name in (ADDRESS_FILE, HTTP_FILE):
            found.append(path.name)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(module, "replace_file", write_and_tell)
    signals = (signal.SIGTERM, signal.SIGINT, STEP_ASIDE)
    before = [signal.signal(number, too_early) for number in signals]
    try:
        Server(load(config_file)).serve()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    assert found == [ADDRESS_FILE, HTTP_FILE], "who waits for the second finds both"


@pytest.mark.parametrize("with_keys", [False, True], ids=["without keys", "with keys"])
@pytest.mark.parametrize("key", ["broker.bind", "operations.http"])
def test_a_broker_whose_port_is_taken_releases_everything(config_file, tmp_path, key, with_keys):
    """The journal and the access control are released too, even while the caller still holds the error."""
    keygen.make_folder(tmp_path / "keys")
    others = ["--security.keys", str(tmp_path / "keys")] if with_keys else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [f"--{key}", f"tcp://{address}" if key == "broker.bind" else address]
        with pytest.raises(BindError, match=f"'{key}' = '.*{address}'") as heard:
            Server(load(config_file, words + others))
    with closing(Server(load(config_file, others))) as server:
        assert server.address and heard.value
    for thread in threading.enumerate():
        if thread.name == "zap":
            thread.join(60.0)
            assert not thread.is_alive()
