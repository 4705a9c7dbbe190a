"""What another April wrote or says is refused with a sentence that names it: journal, run folder, protocol."""

import zlib

import msgpack
import orjson
import pytest
import zmq

from april import __version__, wire
from april.broker.journal.journal import Journal
from april.broker.server import Server
from april.config import load
from april.util.versions import FILE, JOURNAL, PROTOCOL, PROTOCOLS, RUN_FOLDER, OtherApril, minor
from april.wire.sockets import base
from april.wire.sockets.broker import AccessDenied, BrokerConnection
from tests.support.refusals import refusal
from tests.support.run_processes import APRIL

EVENT = ["RunStarted", "small", "a dataset", 0, 4, 2, 5, 5, None, 24, False, 1.0]


def old_record(event, synced=0):
    """As April 0.1 wrote it, which no file beside it says."""
    body = msgpack.packb(event)
    head = b"\x93\xcf" + synced.to_bytes(8) + b"\xce" + zlib.crc32(body, zlib.crc32(synced.to_bytes(8))).to_bytes(4)
    return head + b"\xc6" + len(body).to_bytes(4) + body


@pytest.fixture
def config(config_file):
    return load(config_file)


@pytest.fixture
def run_dir(config):
    """Of a run that April 0.1 began."""
    journal = config.run_dir / "journal"
    journal.mkdir(parents=True)
    (journal / f"{0:020d}.msgpack").write_bytes(old_record(EVENT))
    (config.run_dir / "config.toml").write_text(config.to_toml())
    return config.run_dir


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("table", [JOURNAL.aprils, RUN_FOLDER.aprils, PROTOCOLS], ids=["journal", "folder", "protocol"])
def test_the_last_number_of_each_table_is_this_april_s(table):
    assert table[max(table)] == minor(__version__)
    assert max(PROTOCOLS) == wire.PROTOCOL


def test_a_broker_refuses_an_older_run_and_leaves_it_as_it_is(run_dir, config_file, start):
    before = contents(run_dir)
    job = start("log", [*APRIL, "broker", str(config_file)])
    assert job.wait() == 2
    assert job.output == (
        f"april broker: run folder {run_dir} was written by April 0.1 (format 1, where this April 0.2 has "
        f"{RUN_FOLDER.current}); finish it with april-rl==0.1.*, or choose another run.name\n"
    )
    assert contents(run_dir) == before


def test_the_journal_alone_is_refused_as_well(run_dir, config):
    RUN_FOLDER.claim(run_dir, new=True)
    with pytest.raises(OtherApril, match=r"/journal .*April 0\.1"):
        Server(config)


def test_a_newer_run_names_the_april_that_wrote_it(tmp_path):
    (tmp_path / FILE).write_bytes(orjson.dumps({"format": 99, "april": "7.5.3"}))
    with pytest.raises(OtherApril, match=r"April 7\.5 \(format 99"):
        Journal(tmp_path).close()


def test_a_damaged_stamp_is_no_number(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"format": 2')
    (tmp_path / f"{0:020d}.msgpack").write_bytes(b"")
    with pytest.raises(OtherApril, match="which April"):
        Journal(tmp_path).close()


def test_a_journal_of_this_april_is_opened_again(tmp_path):
    for _ in range(2):
        Journal(tmp_path).close()
    assert orjson.loads((tmp_path / FILE).read_bytes()) == {"format": JOURNAL.current, "april": __version__}


def test_status_report_and_resume_refuse_an_older_run_folder(run_dir, config_file, capsys):
    for command in (["status", run_dir], ["report", run_dir], ["run", config_file, "--resume"]):
        assert f"{run_dir} was written by April 0.1 (format 1" in refusal(capsys, *command)


@pytest.fixture
def dealer():
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket.close()
    context.term()


@pytest.mark.parametrize(("protocol", "named"), [(3, "an earlier April"), (PROTOCOL + 1, "a later April")])
def test_the_broker_tells_a_peer_of_another_protocol_in_that_protocol(config, dealer, protocol, named):
    server = Server(config)
    try:
        dealer.connect(server.address)
        dealer.send_multipart(wire.encode(wire.Hello("worker", "w", "u", []), (), 0, 1, protocol))
        for _ in range(100):
            server.serve_once()
            if dealer.poll(50):
                break
        header, body = dealer.recv_multipart()
    finally:
        server.close()
    assert wire.HEADER.unpack(header)[:3] == (b"AP", protocol, 0)
    (tag, reason, _), arrays = msgpack.unpackb(body)
    assert (tag, arrays) == ("Refused", [])
    assert reason == (
        f"access denied: this peer speaks protocol {protocol} ({named}), the broker protocol {wire.PROTOCOL} "
        f"(April {minor(__version__)}); install the same April for both"
    )
    assert server.service.peers.refusals == {f"not a message of protocol {wire.PROTOCOL}": 1}


def test_a_peer_of_an_older_broker_ends_with_a_sentence(tmp_path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/broker")
    connection = BrokerConnection(f"ipc://{tmp_path}/broker", "worker", "w", "u", patience_s=60.0)
    try:
        connection.send(wire.Hello("worker", "w", "u", []))
        route, *_ = router.recv_multipart()
        base.send(router, [route, *wire.encode(wire.Refused("not a message of protocol 3"), protocol=3)])
        with pytest.raises(AccessDenied, match=r"protocol 3"):
            list(connection.receive(30_000))
    finally:
        connection.close()
        router.close(0)
        context.term()
