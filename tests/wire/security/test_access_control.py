"""Access control, queried as libzmq queries it."""

import pytest
import zmq
from zmq.utils import z85

from april.wire.security import allow_list
from april.wire.security.access import DOMAIN, ZAP_ADDRESS, AccessControl
from april.wire.security.allow_list import AllowList
from april.wire.security.keys import ALLOW_LIST, load_keys


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def access_control(context, keys):
    return AccessControl(context, load_keys(keys, "broker"), AllowList(keys / ALLOW_LIST))


def handshake_status(context, key):
    """The status code of the handshake of a connection with that key (ZeroMQ RFC 27)."""
    with context.socket(zmq.REQ) as request:
        request.linger = 0
        request.connect(ZAP_ADDRESS)
        request.send_multipart([b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", z85.decode(key)])
        assert request.poll(60_000)
        return request.recv_multipart()[2]


def test_only_keys_on_the_allow_list_pass_the_handshake(context, access_control, keys):
    unlisted, _ = zmq.curve_keypair()
    assert handshake_status(context, load_keys(keys, "worker").public) == b"200"
    assert handshake_status(context, unlisted) == b"400" and access_control.failures["unknown key"] == 1


def test_watch_reports_a_change_that_a_handshake_has_read_first(context, access_control, keys, monkeypatch):
    monkeypatch.setattr(allow_list, "SETTLE_S", 0)
    worker = load_keys(keys, "worker").public
    assert handshake_status(context, worker) == b"200" and not access_control.watch()
    listed = (keys / ALLOW_LIST).read_text()
    (keys / ALLOW_LIST).write_text("\n".join(line for line in listed.splitlines() if " worker " not in line))
    assert handshake_status(context, worker) == b"400"
    assert access_control.watch() and access_control.allow_list.find(worker).role == ""
    assert not access_control.watch()
