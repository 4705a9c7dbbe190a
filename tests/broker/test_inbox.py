"""The broker's inbox: urgent messages before reports, the messages of each connection in order."""

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from april import wire
from april.broker import inbox
from april.broker.inbox import Inbox
from april.wire.limits import FROM_PEER

ROLES = ["worker", "scorer", "agents", "learner", "monitor"]


class Crowd:
    """A peer of each role, each with its data and its control connection to one socket; role k has session id k + 1."""

    def __init__(self):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind("inproc://broker")
        self.peers, self.sessions = {}, {}
        for number, role in enumerate(ROLES, 1):
            for way in ("data", "control"):
                peer = self.peers[role, way] = self.context.socket(zmq.DEALER)
                peer.setsockopt(zmq.IDENTITY, f"{role} {way}".encode())
                peer.connect("inproc://broker")
            routes = {f"{way}_route": f"{role} {way}".encode() for way in ("data", "control")}
            self.sessions[number] = SimpleNamespace(role=role, **routes)
        self.inbox = Inbox(self.socket)

    def send(self, role, way, sequence, session=None):
        number = ROLES.index(role) + 1 if session is None else session
        self.peers[role, way].send_multipart(wire.encode(wire.Heartbeat(), (), number, sequence))

    def handled(self):
        """Yield (role, connection, sequence number) of all messages that have arrived, in the order in which the broker
        handles them."""
        while message := self.inbox.next(self.sessions):
            route, *frames = message
            yield *route.bytes.decode().split(), wire.decode(frames).sequence

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def crowd():
    crowd = Crowd()
    yield crowd
    crowd.close()


def test_a_learner_s_message_is_handled_before_earlier_reports(crowd):
    for sequence in range(50):
        crowd.send("worker", "data", sequence)
        crowd.send("scorer", "data", sequence)
    for sequence in range(3):
        crowd.send("learner", "data", sequence)
    crowd.send("worker", "control", 0)
    found = list(crowd.handled())
    assert {(role, way) for role, way, _ in found[:4]} == {("learner", "data"), ("worker", "control")}
    assert len(found) == 104


def test_a_learner_s_message_overtakes_reports_already_in_the_inbox(crowd):
    for sequence in range(3):
        crowd.send("worker", "data", sequence)
    handled = crowd.handled()
    assert next(handled) == ("worker", "data", 0)
    crowd.send("monitor", "data", 0)
    assert list(handled) == [("monitor", "data", 0), ("worker", "data", 1), ("worker", "data", 2)]


def test_a_message_with_another_peer_s_session_is_not_urgent(crowd):
    crowd.send("worker", "data", 0)
    crowd.send("scorer", "data", 0, session=ROLES.index("learner") + 1)
    crowd.send("worker", "control", 0)
    assert next(crowd.handled()) == ("worker", "control", 0)


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.sampled_from(["data", "control"]), st.booleans(), st.booleans())))
def test_the_messages_of_a_connection_stay_in_order_and_none_is_lost(sent):
    """Also if a session becomes known, or ends, between two messages, or the loop handles a message in between."""
    crowd, found, counts = Crowd(), [], itertools.count()
    try:
        for role, way, known, takes in sent:
            crowd.send(role, way, next(counts), session=None if known else 0)
            if takes:
                found.append(next(crowd.handled()))
        with patch.object(inbox, "URGENT_IN_A_ROW", 1):
            found += crowd.handled()
    finally:
        crowd.close()
    assert sorted(sequence for _, _, sequence in found) == list(range(len(sent)))
    of_each = {}
    for role, way, sequence in found:
        of_each.setdefault((role, way), []).append(sequence)
    assert all(sequences == sorted(sequences) for sequences in of_each.values())


def test_a_monitor_that_floods_the_broker_does_not_starve_reports(crowd):
    for sequence in range(3):
        crowd.send("worker", "data", sequence)
    handled, found = crowd.handled(), []
    for sequence in range(60):
        crowd.send("monitor", "data", sequence)
        found.append(next(handled)[0])
    assert found.count("worker") == 3


def test_the_inbox_is_bounded_in_bytes_and_messages(crowd, monkeypatch):
    monkeypatch.setattr(inbox, "INBOX_MESSAGES", 4)
    for sequence in range(10):
        crowd.send("worker", "data", sequence)
    handled = crowd.handled()
    next(handled)
    assert crowd.inbox.has_message and crowd.socket.poll(0)
    assert [sequence for _, _, sequence in handled] == list(range(1, 10)) and not crowd.inbox.has_message


def test_of_a_message_with_too_many_frames_only_one_too_many_is_kept(crowd):
    crowd.peers["worker", "data"].send_multipart([b""] * 5000)
    _, *frames = crowd.inbox.next(crowd.sessions)
    assert len(frames) == FROM_PEER.frames + 1
    with pytest.raises(wire.WireError, match="large"):
        wire.decode(frames, FROM_PEER)


def test_a_message_without_frames_is_returned(crowd):
    crowd.peers["worker", "data"].send(b"")
    route, *frames = crowd.inbox.next(crowd.sessions)
    assert route.bytes == b"worker data" and [bytes(frame) for frame in frames] == [b""]
