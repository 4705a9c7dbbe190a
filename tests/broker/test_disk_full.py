"""A broker that cannot write its journal acknowledges nothing, but still answers questions. It continues when the disk
has space again, or after a restart if the fault was another one. A broker that is out of file descriptors continues
with its open files. A call that failed and was no write of the journal ends nothing: a read is waited for, any other is
made again from what is on disk, and a figure is left out."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from april import config as configuration
from april import wire
from april.broker import server
from april.broker.journal.journal import Journal
from april.broker.ledger.events import BrokerStarted
from april.broker.service import Service
from april.learner.source import BrokerSource
from april.util.files import write_and_sync
from april.util.lifetime import STEPPED_ASIDE
from april.wire.message import Version
from april.wire.sockets.broker import BrokerConnection, BrokerUnreachable
from tests.support.broker_conversation import make_batch, metrics_lines, one_row, train
from tests.support.run_processes import wait_until
from tests.support.serving_broker import serving


@pytest.fixture
def broker(start_broker):
    return start_broker()


@pytest.fixture
def join():
    connections = []

    def start(address, role):
        connection = BrokerConnection(address, role, role, uuid.uuid4().hex, patience_s=60.0)
        connection.hello([])
        connections.append(connection)
        return connection

    yield start
    for connection in connections:
        connection.close()


def wait_for(connection, kind, timeout_s=60.0, never=()):
    """Wait for the next message of type `kind`; a message of the types `never` before it is a failure."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for received in connection.receive(timeout_ms=200):
            assert not isinstance(received.message, never), received.message
            if isinstance(received.message, kind):
                return received
    raise AssertionError(f"no {kind.__name__}")


def generate_three(worker, learner):
    """Start the learner, and generate three tokens of a sample; returns the lease's id once they are acknowledged."""
    assert isinstance(learner.request(wire.StartLearner(0, "tcp://127.0.0.1:9"), 60.0).message, wire.LearnerAdmitted)
    worker.send(wire.WorkerCapacity(Version(0, 0), 4))
    lease_id = wait_for(worker, wire.Grants).message.grants[0].lease_id
    worker.send(*one_row(lease_id, 0, 3))
    assert wait_for(worker, wire.Answers).message.acks == [(lease_id, 3)]
    return lease_id


def status_of(monitor):
    return orjson.loads(bytes(monitor.request(wire.StatusRequest(), 60.0).arrays[0]))


def limit_files(job, size):
    """Limit the size of files that the job's process writes to `size` bytes; None: no limit."""
    _, hard = resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@pytest.mark.full
def test_a_full_disk_costs_nothing_that_was_acknowledged_and_ends_by_itself(broker, join):
    worker, monitor = join(broker.address, "worker"), join(broker.address, "monitor")
    lease_id = generate_three(worker, join(broker.address, "learner"))

    limit_files(broker, sum(path.stat().st_size for path in (broker.run_dir / "journal").glob("*.msgpack")))
    worker.send(*one_row(lease_id, 3, 2))
    while (status := status_of(monitor))["state"] != "read only":
        pass
    assert "cannot be written" in status["read_only"] and "READ ONLY" in broker.output
    wait_for(worker, wire.Renewed, never=wire.Answers)  # peers learn that the broker lives
    late = BrokerConnection(broker.address, "worker", "late", uuid.uuid4().hex, patience_s=60.0)
    with contextlib.closing(late), pytest.raises(BrokerUnreachable):
        late.hello([], timeout_s=1.0)

    limit_files(broker, None)
    assert "unknown session" in wait_for(worker, wire.Refused).message.reason
    welcome = worker.hello([lease_id], acknowledged_tokens=3)
    assert (welcome.broker_start, welcome.lost_lease_ids) == (2, [])
    worker.send(*one_row(lease_id, 3, 2))
    assert (lease_id, 5) in wait_for(worker, wire.Answers).message.acks
    monitor.hello([])
    status = status_of(monitor)
    assert (status["state"], status["read_only"], status["ledger_closed"]) == ("running", "", True)


def break_down(*arguments):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_an_i_o_error_costs_nothing_that_was_acknowledged_and_waits_for_a_restart(config_file, join, monkeypatch, call):
    config = configuration.load(config_file)
    monkeypatch.setattr(server, "RETRY_S", 0.0)
    with serving(config) as live:
        worker, monitor = join(live.address, "worker"), join(live.address, "monitor")
        lease_id = generate_three(worker, join(live.address, "learner"))
        with monkeypatch.context() as broken:
            broken.setattr(os, call, break_down)
            worker.send(*one_row(lease_id, 3, 2))
            while status_of(monitor)["state"] != "read only":
                pass
        wait_for(worker, wire.Renewed, never=wire.Answers)
        status = status_of(monitor)
        assert (status["state"], "Input/output error" in status["read_only"]) == ("read only", True), "a mended disk"
    with serving(config):
        welcome = worker.hello([lease_id], acknowledged_tokens=3)
        assert (welcome.broker_start, welcome.lost_lease_ids) == (2, [])
        worker.send(*one_row(lease_id, 3, 2))
        assert (lease_id, 5) in wait_for(worker, wire.Answers).message.acks


def test_a_run_that_is_stopped_while_the_disk_is_full_stays_stopped_when_it_has_room(config_file, join, monkeypatch):
    def no_room(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(server, "RETRY_S", 0.0)
    with serving(configuration.load(config_file)) as live:
        worker, monitor = join(live.address, "worker"), join(live.address, "monitor")
        lease_id = generate_three(worker, join(live.address, "learner"))
        with monkeypatch.context() as full:
            full.setattr(os, "fdatasync", no_room)
            worker.send(*one_row(lease_id, 3, 2))
            while status_of(monitor)["state"] != "read only":
                pass
            monitor.request(wire.StopRun("enough"), 60.0)
        deadline, status = time.monotonic() + 60, {"read_only": "yes"}
        while status["read_only"] and time.monotonic() < deadline:
            monitor.hello([])
            status = status_of(monitor)
    assert (status["read_only"], status["state"]) == ("", "stopped")


@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_learner_ends_with_a_run_that_is_stopped_while_nothing_can_be_written(talk, worker, learner, stopped_first):
    train(talk, worker, learner, 0)
    make_batch(worker)
    learner.fetch(1)
    if stopped_first:
        talk.service.stop("enough", "stopped", talk.now)
    talk.service.enter_read_only("the disk is full")
    learner.say(wire.Consumed(1, {}, ""))
    if not stopped_first:
        assert not learner.take(wire.Accepted)
        talk.service.stop("enough", "stopped", talk.now)
        talk.tick()
    assert "unknown session" in learner.take(wire.Refused)[-1].message.reason
    learner.hello()
    for report in (wire.Consumed(1, {}, ""), wire.Fetch(2), wire.Durable(2, 2)):
        learner.say(report)
        assert learner.take(wire.Finished)[-1].message.reason == "enough", report
    assert not learner.take(wire.Accepted) and talk.ledger.steps.consumed == 1, "what is answered is on disk"
    learner.say(wire.Goodbye())
    talk.tick(talk.config.broker.session_timeout_s + 1.0)
    assert talk.service.everyone_left(), "a worker that was killed holds nobody up"


def test_peers_that_are_answered_are_heard_of(talk, worker, learner):
    talk.service.enter_read_only("the disk is full")
    for _ in range(10):
        talk.tick(talk.config.learner.hung_s / 4)
        learner.say(wire.Heartbeat([], loop_position="waiting for the broker"))
    assert talk.status()["learner_silent_s"] == 0 and learner.take(wire.Renewed)
    assert talk.status()["learner_loop"]["at"] == "waiting for the broker"


def test_a_source_ends_with_a_run_that_is_stopped_while_nothing_can_be_written(config_file, join, monkeypatch):
    with serving(configuration.load(config_file)) as live, ThreadPoolExecutor() as threads:
        worker, monitor = join(live.address, "worker"), join(live.address, "monitor")
        source = BrokerSource(live.address, "tcp://127.0.0.1:9", 60.0)
        assert source.start(0) == (0, 0)
        monkeypatch.setattr(os, "fdatasync", break_down)
        worker.send(wire.WorkerCapacity(Version(0, 0), 4))
        while status_of(monitor)["state"] != "read only":
            pass
        waiting = [threads.submit(source.fetch, 0), threads.submit(source.durable, 0, 0)]
        monitor.request(wire.StopRun("enough"), 60.0)
        assert [future.result(60.0) for future in waiting] == [None, None]
        source.close()
        late = BrokerSource(live.address, "tcp://127.0.0.1:9", 60.0)
        with pytest.raises(BrokerUnreachable, match="enough"):
            late.start(0)
        wait_until(lambda: live.service.peers.learner() is None)


def open_files(job):
    return len(list(Path(f"/proc/{job.process.pid}/fd").iterdir()))


@pytest.fixture
def many_files(config_file):
    text = config_file.read_text().replace("max_response_tokens = 24", "max_response_tokens = 100")
    broker = 'broker = { bind = "tcp://127.0.0.1:*", journal_file_records = 100 }'
    config_file.write_text(f'{text}{broker}\nsecurity = {{ keys = "off" }}\n')


@pytest.mark.full
def test_idle_connections_may_take_every_descriptor_without_loss(many_files, broker, join):
    worker, monitor = join(broker.address, "worker"), join(broker.address, "monitor")
    lease_id = generate_three(worker, join(broker.address, "learner"))
    limit = open_files(broker) + 20
    resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    host, port = broker.address.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as silent:
        for _ in range(60):
            silent.enter_context(socket.create_connection((host, int(port))))
        wait_until(lambda: open_files(broker) == limit, broker)
        for length in range(3, 99):
            worker.send(*one_row(lease_id, length, 1))
            while (lease_id, length + 1) not in wait_for(worker, wire.Answers).message.acks:
                pass
        status = status_of(monitor)
        assert (status["state"], status["read_only"], status["ledger_closed"]) == ("running", "", True)
        assert "grows on" in broker.output
    wait_until(lambda: open_files(broker) < limit, broker)


def test_a_broker_that_cannot_read_its_journal_goes_on_when_it_can(config_file, join, monkeypatch):
    config = configuration.load(config_file)
    monkeypatch.setattr(server, "RETRY_S", 0.0)
    with serving(config) as live:
        worker = join(live.address, "worker")
        generate_three(worker, join(live.address, "learner"))
        worker.send(wire.Goodbye())
        wait_until(lambda: not live.service.peers.workers())
    with serving(config) as live:
        with monkeypatch.context() as broken:
            broken.setattr(os, "pread", break_down)
            worker.hello([])
            worker.send(wire.WorkerCapacity(Version(0, 0), 4))
            wait_until(lambda: "cannot be read" in live.service.run.read_only)
        wait_until(lambda: not live.service.run.read_only)
        worker.hello([])
        worker.send(wire.WorkerCapacity(Version(0, 0), 4))
        lease_id = wait_for(worker, wire.Grants).message.grants[0].lease_id
        worker.send(*one_row(lease_id, 3, 2))
        assert (lease_id, 5) in wait_for(worker, wire.Answers).message.acks, "the three before it are there"
        assert live.service.ledger.account.counts["unreadable"] == 0


ERRORS = [errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES]


@pytest.mark.parametrize("number", ERRORS)
def test_any_other_call_that_fails_costs_nothing_and_stops_nothing(config_file, join, monkeypatch, number):
    monkeypatch.setattr(server, "RETRY_S", 0.0)
    with serving(configuration.load(config_file)) as live:
        worker, monitor = join(live.address, "worker"), join(live.address, "monitor")
        lease_id = generate_three(worker, join(live.address, "learner"))
        failing, real = [OSError(number, os.strerror(number))], Service.tick

        def tick(*arguments):
            if failing:
                raise failing.pop()
            return real(*arguments)

        monkeypatch.setattr(Service, "tick", tick)
        wait_until(lambda: not failing and not live.service.run.read_only)
        welcome = worker.hello([lease_id], acknowledged_tokens=3)
        assert (welcome.broker_start, welcome.lost_lease_ids) == (2, [])
        worker.send(*one_row(lease_id, 3, 2))
        assert (lease_id, 5) in wait_for(worker, wire.Answers).message.acks
        monitor.hello([])
        assert status_of(monitor)["read_only"] == ""


@pytest.mark.parametrize("number", ERRORS)
def test_a_figure_that_cannot_be_had_is_left_out_of_its_line(talk, worker, learner, monkeypatch, number):
    def refused(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "disk_usage", refused)
    train(talk, worker, learner, 0)
    [line] = metrics_lines(talk)
    assert line["step"] == 1 and line["disk_free_bytes"] is None and not talk.service.run.read_only


@pytest.mark.parametrize("call", ["fstat", "close"])
def test_a_closed_file_of_the_journal_is_let_go_whatever_the_system_says(tmp_path, monkeypatch, call):
    journal = Journal(tmp_path)
    for number in range(2):
        journal.append(BrokerStarted(number))
        journal.rotate()
    with monkeypatch.context() as broken:
        broken.setattr(os, call, break_down)
        journal.release_files([0])
    journal.append(BrokerStarted(2))
    journal.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_file_of_the_journal_grows_on_while_no_other_can_be_opened(talk, worker, learner, monkeypatch, number):
    """Nothing was written to the other one, so nothing is in doubt."""
    real, refused = os.open, []

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_EXCL:
            refused.append(path)
            raise OSError(number, os.strerror(number))
        return real(path, flags, *arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        broken.setattr(Journal, "file_full", True)
        train(talk, worker, learner, 0)
        talk.service.end_file()
    assert refused and talk.journal.file_start == 0
    train(talk, worker, learner, 1)
    assert talk.journal.rotate() == talk.journal.end and talk.ledger.steps.frontier == 2


def test_a_sync_does_not_depend_on_what_the_page_cache_gives_back(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fadvise", break_down)
    with (tmp_path / "file").open("wb") as file:
        write_and_sync(file.fileno(), [b"data"], 0, [(file.fileno(), 0, 4096)])
    assert (tmp_path / "file").read_bytes() == b"data"


@pytest.mark.full
def test_a_signal_ends_a_broker_that_cannot_write(broker, join):
    worker = join(broker.address, "worker")
    lease_id = generate_three(worker, join(broker.address, "learner"))
    limit_files(broker, sum(path.stat().st_size for path in (broker.run_dir / "journal").glob("*.msgpack")))
    worker.send(*one_row(lease_id, 3, 2))
    wait_until(lambda: "READ ONLY" in broker.output, broker)
    broker.process.send_signal(signal.SIGTERM)
    assert broker.wait(server.LEAVE_AFTER_SIGNAL_S / 2) == STEPPED_ASIDE, "whoever watches starts it again"
    assert "told to leave by SIGTERM" in broker.output


def test_a_command_that_did_not_reach_the_disk_is_refused(config_file, join, monkeypatch):
    config = configuration.load(config_file)
    with serving(config) as live:
        monitor = join(live.address, "monitor")
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", break_down)
            assert "Input/output error" in monitor.request(wire.Drain(), 60.0).message.reason
        assert isinstance(monitor.request(wire.StopRun("to mend the disk"), 60.0).message, wire.Accepted)
    with serving(config) as live:
        assert status_of(join(live.address, "monitor"))["drain"] == ""
