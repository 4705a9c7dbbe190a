"""Rights of a CURVE key, whatever the messages on its connection claim; the key's owner is passed to the service
without sockets."""

import uuid
from types import SimpleNamespace

import pytest

from april import wire
from april.broker.handlers.learner import NodeHandler
from april.broker.peers import RESERVED_SHARE
from april.broker.server import Server
from april.config.broker import SecuritySection
from april.wire.security.allow_list import KeyOwner
from tests.support.broker_conversation import FakeWorker

A, B = "a" * 40, "b" * 40


class KeyedWorker(FakeWorker):
    """A worker whose messages come over a connection with a CURVE key."""

    def __init__(self, conversation, name, key, role="worker"):
        super().__init__(conversation, name)
        self.key = KeyOwner(key, role, f"holder of {key[0]}")

    def say(self, message, arrays=(), connection=b"data"):
        frames = [bytes(frame) for frame in wire.encode(message, list(arrays), self.session, 1)]
        route = self.name.encode() + b"/" + connection
        self.conversation.service.handle(route, frames, self.conversation.now, self.key)
        self.conversation.tick()

    @property
    def refusal(self):
        return self.take(wire.Refused)[-1].message.reason


@pytest.fixture
def owner(talk):
    owner = KeyedWorker(talk, "w0", A)
    owner.join()
    assert owner.grants()
    return owner


def test_nobody_takes_the_place_of_another_key(talk, owner):
    thief = KeyedWorker(talk, "thief", B)
    thief.say(wire.Hello("worker", "w0", "a process of its own"))
    assert "another key works under the name w0" in thief.refusal
    thief.say(wire.Hello("worker", "another name", owner.uid))
    assert "another key works under the name" in thief.refusal
    assert [session.key for session in talk.service.peers.workers()] == [A]


def test_a_session_belongs_to_the_key_that_opened_it(owner):
    owner.key = KeyOwner(B, "worker", "thief")
    owner.say(wire.Heartbeat())
    assert "the session belongs to another key" in owner.refusal


def test_the_role_is_the_key_s_whatever_a_hello_says(talk):
    worker = KeyedWorker(talk, "w0", A)
    for role in ("learner", "monitor", "scorer"):
        worker.say(wire.Hello(role, "w0", "u"))
        assert f"a worker's, not a {role}'s" in worker.refusal
    assert not talk.service.peers.by_id


def test_messages_of_a_key_off_the_allow_list_are_refused(talk):
    stranger = KeyedWorker(talk, "w0", A, role="")
    stranger.say(wire.Hello("worker", "w0", "u"))
    assert "not on the allow-list" in stranger.refusal
    assert not talk.service.peers.by_id


def machines(talk, *names):
    found = [KeyedWorker(talk, name, A, role="learner") for name in names]
    for node in found:
        node.say(wire.Hello("node", node.name, uuid.uuid4().hex))
        node.session = node.take(wire.Welcome)[-1].message.session
    return found


def test_machines_with_the_learner_s_key_get_the_rendezvous_of_the_first_while_it_is_connected(talk):
    first, other = machines(talk, "node-0", "node-1")

    def address():
        other.say(wire.Rendezvous())
        return other.take(wire.Rendezvous)[-1].message.address

    assert address() == ""
    first.say(wire.Rendezvous("10.0.0.2:5556"))
    assert address() == "10.0.0.2:5556"
    first.say(wire.Goodbye())
    assert address() == ""


def test_a_change_of_the_allow_list_ends_the_sessions_of_keys_off_it_alone(talk):
    """A machine's key is its learner's."""
    machines(talk, "node-0")
    KeyedWorker(talk, "w0", B).join()
    listed = SimpleNamespace(find=lambda key: KeyOwner(key, "learner" if key == A else "", ""))
    Server._end_revoked(SimpleNamespace(service=talk.service, access_control=SimpleNamespace(allow_list=listed)))
    assert [peer.role for peer in talk.service.peers.by_id.values()] == ["node"]


def test_all_machines_of_a_learner_begin_anew_when_the_process_of_one_is_new(talk):
    first, other = machines(talk, "node-0", "node-1")

    def told(node, start):
        node.say(wire.Rendezvous("", start))
        return node.take(wire.Rendezvous)[-1].message.start

    one, two = told(first, 0), told(other, 0)
    assert two == one + 1
    assert [told(first, 0), told(first, two), told(other, two)] == [two] * 3, "what is said again makes no start"
    (replaced,) = machines(talk, "node-1")
    assert [told(replaced, 0), told(first, two)] == [two + 1] * 2
    later = two + 9
    assert [told(first, later), told(replaced, two + 1)] == [later] * 2, "a restarted broker learns it"


def test_a_rendezvous_after_a_restart_of_the_broker_has_a_higher_start_number(talk):
    """Whoever comes first, a machine that goes on or a new one."""
    before = NodeHandler(peers := talk.service.peers)
    peers.start_ids(1)
    (old,) = machines(talk, "node-0")
    after, said = NodeHandler(peers), []
    peers.start_ids(2)
    (new,) = machines(talk, "node-1")
    for handler, node, start in ((before, old, 0), (after, new, 0)):
        peer = peers.by_id[node.session]
        handler.on_rendezvous(peer, SimpleNamespace(message=wire.Rendezvous("", start), sequence=0), 0.0)
        said.append(handler._start)
    assert said[0] < said[1]


def test_one_key_serves_a_large_cluster_by_default_and_leaves_sessions_to_others():
    security = SecuritySection()
    reserved = 2 * (security.max_sessions // RESERVED_SHARE)
    assert 3000 < security.max_key_sessions < security.max_sessions - reserved


def test_a_flood_of_one_key_leaves_sessions_to_others_the_learner_and_monitors(converse):
    talk = converse("--security.max_sessions", "64", "--security.max_key_sessions", "40")

    def admitted(role, key, count=100):
        names = [f"{role}-{key[0]}-{number}" for number in range(count)]
        peers = [KeyedWorker(talk, name, key, "learner" if role == "node" else role) for name in names]
        for peer in peers:
            peer.say(wire.Hello(role, peer.name, peer.uid))
        return sum(not peer.take(wire.Refused) for peer in peers)

    assert admitted("worker", A) == 40, "security.max_key_sessions"
    assert admitted("scorer", B) == 64 - 40 - 4 - 4, "all but the reserved ones"
    assert admitted("monitor", "c" * 40) == 4
    assert admitted("worker", "d" * 40, 1) == 0
    assert admitted("learner", "e" * 40, 1) == 1 and admitted("node", "e" * 40) == 3
