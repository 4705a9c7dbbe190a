"""The server's side of CURVE, asked as libzmq asks it."""

import pytest
import zmq
from zmq.utils import z85

from april.security.allow_list import AllowList
from april.security.door import DOMAIN, ZAP_ADDRESS, Door
from april.security.keys import ALLOW_LIST, load_keys


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def door(context, keys):
    return Door(context, load_keys(keys, "broker"), AllowList(keys / ALLOW_LIST))


def knock(context, key):
    """The status code that a connection with that key is answered in its handshake (ZeroMQ RFC 27)."""
    with context.socket(zmq.REQ) as asking:
        asking.linger = 0
        asking.connect(ZAP_ADDRESS)
        asking.send_multipart([b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", z85.decode(key)])
        assert asking.poll(60_000)
        return asking.recv_multipart()[2]


def test_a_handshake_is_for_keys_on_the_list(context, door, keys):
    unlisted, _ = zmq.curve_keypair()
    assert knock(context, load_keys(keys, "worker").public) == b"200"
    assert knock(context, unlisted) == b"400" and door.failures["unknown key"] == 1


def test_the_owner_hears_of_a_change_that_a_handshake_has_read_first(context, door, keys):
    worker = load_keys(keys, "worker").public
    assert knock(context, worker) == b"200" and not door.watch()
    listed = (keys / ALLOW_LIST).read_text()
    (keys / ALLOW_LIST).write_text("\n".join(line for line in listed.splitlines() if " worker " not in line))
    assert knock(context, worker) == b"400"
    assert door.watch() and door.allow_list.find(worker).role == ""
    assert not door.watch()
