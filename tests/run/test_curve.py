"""A real run with keys on every socket; and who has none, or the wrong one, is told so instead of left to hang."""

import sys
import uuid

import orjson
import pytest
import zmq

from april import wire
from april.config import ConfigError
from april.wire.security import keygen
from april.wire.security.keys import ALLOW_LIST, RUN_KEYS, load_keys
from april.wire.sockets import base
from april.wire.sockets.broker import AccessDenied, BrokerConnection, BrokerUnreachable
from tests.support.run_processes import APRIL, steps_recorded, wait_until

TCP = ("--broker.bind", "tcp://127.0.0.1:*")


@pytest.fixture
def keys(tmp_path):
    keygen.make_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def broker(start_broker, keys):
    return start_broker("--security.keys", str(keys), *TCP)


@pytest.fixture
def connect(broker):
    connections = []

    def begin(role, keys, name="peer"):
        connections.append(BrokerConnection(broker.address, role, name, uuid.uuid4().hex, 60.0, keys))
        return connections[-1]

    yield begin
    for connection in connections:
        connection.close()


def ask_status(connection):
    connection.hello([])
    return orjson.loads(connection.request(wire.StatusRequest(), 60.0).arrays[0].tobytes())


def test_a_run_that_listens_on_tcp_makes_keys_for_all_its_sockets_and_comes_to_its_end(finish_run, run_dir):
    job, summary = finish_run(*TCP, "--learner.ranks", "1")
    assert summary["steps"] == 3
    assert "handshake" not in (run_dir / "logs/broker.log").read_text()
    keys = run_dir / RUN_KEYS
    secrets = [load_keys(keys, role).secret for role in ("broker", "worker", "learner", "monitor")]
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.parent != keys]
    written = b"".join(path.read_bytes() for path in files) + job.output.encode()
    assert not [secret for secret in secrets if secret.encode() in written], "no secret in a log"


@pytest.mark.full
def test_every_wrong_key_is_refused_with_a_sentence_and_counted(broker, connect, keys, tmp_path):
    keygen.make_folder(tmp_path / "others")
    stranger = load_keys(tmp_path / "others", "monitor")
    unlisted = keygen.Keys("monitor", "x", stranger.public, stranger.secret, load_keys(keys, "broker").public)
    for wrong, reason in (
        (None, "keys"),
        (unlisted, "not on the allow-list"),
        (stranger, "other keys.*by the run's folder"),
    ):
        with pytest.raises(AccessDenied, match=reason):
            connect("monitor", wrong).hello([])
    monitor = connect("monitor", load_keys(keys, "monitor"))

    def are_counted():
        """Where there are no keys, as whichever side has hung up first says it."""
        failed = ask_status(monitor)["failed_handshakes"].keys()
        return {"unknown key", "wrong broker key"} <= failed and failed & {"no keys", "broken off"}

    wait_until(are_counted, broker)
    wait_until(lambda: f"unknown key, {stranger.public} from 127.0.0.1" in broker.output, broker)


def test_a_peer_whose_socket_takes_nothing_any_more_hears_that_it_was_turned_away(connect, monkeypatch):
    def full(*_, **__):
        raise zmq.Again

    connection = connect("monitor", None)
    monkeypatch.setattr(base, "send", full)

    def hears_why():
        with pytest.raises((AccessDenied, BrokerUnreachable)) as said:
            connection.hello([])
        return "security.keys" in str(said.value)

    wait_until(hears_why)


def test_an_operator_needs_a_monitor_s_key(broker, keys, capsys):
    from april.cli import main

    status = ["status", "--connect", broker.address]
    assert main(status) == 1 and "security.keys" in capsys.readouterr().err
    assert main([*status, "--security.keys", str(keys / "worker.key")]) == 2
    assert main([*status, "--security.keys", str(keys)]) == 0
    (broker.run_dir / "config.toml").write_text(f'[security]\nkeys = "{keys}"\n')
    assert main(["drain", str(broker.run_dir)]) == 0


def test_a_role_is_that_of_the_key_whatever_a_message_says(broker, connect, keys):
    worker = load_keys(keys, "worker")
    for role in ("learner", "monitor"):
        with pytest.raises(AccessDenied, match=f"not a {role}'s"):
            connect(role, worker).hello([])
    connection = connect("worker", worker)
    connection.hello([])
    for message in (
        wire.Fetch(0),
        wire.Consumed(0, {}),
        wire.Durable(0, 0),
        wire.StartLearner(0, "x"),
        wire.StopRun(""),
    ):
        connection.send(message)
        answers = []
        while not answers:
            heard = connection.receive(1000)
            answers = [each for each in heard if not isinstance(each.message, wire.Renewed | wire.Evaluating)]
        assert answers[0].message.reason.startswith("bad message: not for a worker to send")
    status = ask_status(connect("monitor", load_keys(keys, "monitor")))
    assert status["state"] == "running" and status["refusals"]["access denied"] == 2


def test_nobody_takes_the_place_of_another_key(broker, connect, keys):
    keygen.add_peer(keys, "worker", "w7")
    connect("worker", load_keys(keys, "worker"), "gpu-7").hello([])
    thief = load_keys(keys / "w7.key", "worker")
    with pytest.raises(AccessDenied, match="name gpu-7"):
        connect("worker", thief, "gpu-7").hello([])
    connect("worker", thief, "gpu-8").hello([])


def test_a_key_taken_off_the_list_loses_its_session_and_one_added_gets_in(broker, connect, keys):
    path = keygen.add_peer(keys, "worker", "w7")
    connection = connect("worker", load_keys(path, "worker"), "w7")
    connection.hello([])
    listed = (keys / ALLOW_LIST).read_text()
    (keys / ALLOW_LIST).write_text("".join(line for line in listed.splitlines(True) if " w7" not in line))
    wait_until(lambda: "worker w7 is lost" in broker.output, broker)
    with pytest.raises(AccessDenied, match="not on the allow-list"):
        connection.request(wire.Heartbeat(), 60.0)
    assert "w7" not in [
        worker["name"] for worker in ask_status(connect("monitor", load_keys(keys, "monitor")))["workers"]
    ]


@pytest.mark.full
def test_parts_with_the_wrong_key_end_with_a_sentence(broker, start, config_file, keys, tmp_path):
    keygen.make_folder(tmp_path / "others")
    with_others = ["--connect", broker.address, "--security.keys", str(tmp_path / "others")]
    worker = start("worker", [*APRIL, "worker", str(config_file), *with_others])
    launch = [sys.executable, "-m", "april.learner.launch", "--nproc-per-node", "1"]
    learner = start("learner", [*launch, "-m", "april.learner", str(config_file), *with_others])
    assert worker.wait() == 2
    assert learner.wait() == 2
    for job in (worker, learner):
        (sentence,) = [line for line in job.output.splitlines() if "does not let this" in line]
        assert "security.keys" in sentence and "Traceback" not in job.output


@pytest.mark.full
def test_workers_with_keys_of_their_own_reach_the_learner_s_weights_too(broker, start, config_file, keys, tmp_path):
    path = keygen.add_peer(keys, "worker", "w7")
    arguments = [str(config_file), "--connect", broker.address, "--security.keys"]
    launch = [sys.executable, "-m", "april.learner.launch", "--nproc-per-node", "1"]
    learner = start("learner", [*launch, "-m", "april.learner", *arguments, str(keys)])
    worker = start("worker", [*APRIL, "worker", *arguments, str(path)])
    assert broker.wait() == learner.wait() == worker.wait() == 0, broker.output + learner.output + worker.output
    assert steps_recorded(broker.run_dir) == 3


def test_a_worker_s_key_file_is_no_broker_s(config_file, keys):
    from april import config as configuration
    from april.broker.server import Server

    with pytest.raises(ConfigError, match="of a worker"):
        Server(configuration.load(config_file, ["--security.keys", str(keys / "worker.key")]))
