"""A short run of the fuzzer: no message raises, is recorded, or changes the ledger, unless it is a valid message of its
own sender."""

import logging
import random

import pytest

from april import wire
from april.broker.peers import Peers, TokenTally
from april.broker.service import MESSAGES
from april.wire import limits
from tests.broker.arena import Arena
from tests.broker.fuzz import fuzz, make_configs
from tests.broker.fuzz_sockets import fuzz_sockets
from tests.support.broker_conversation import FakeWorker, Peer, joined


@pytest.fixture
def configs(config_file, tmp_path):
    logging.disable(logging.CRITICAL)
    yield make_configs(config_file, tmp_path)
    logging.disable(logging.NOTSET)


def test_the_runs_under_fire_use_every_message_that_does_their_work(configs):
    said = set()
    for config in configs:
        arena = Arena(config, random.Random(0))
        for _ in range(20):
            arena.progress()
        said |= arena.said
        arena.journal.close()
    needed = {kind.__name__ for role in ("worker", "scorer", "agents", "learner") for kind in MESSAGES[role]}
    assert said >= needed


@pytest.mark.full
def test_fifty_thousand_hostile_messages_change_nothing(configs):
    for config in configs:
        refusals = fuzz(config, 17_000, seed=1)
        assert {"access denied", "unknown session", "the lease is not current", "too large"} <= set(refusals)


def test_hostile_messages_over_real_sockets_are_each_refused_with_a_sentence(configs, tmp_path):
    assert fuzz_sockets(configs[1], 3000, tmp_path).total() == 3000


def test_a_run_takes_no_more_sessions_than_it_is_told(converse):
    talk = converse("--security.max_sessions", "2")
    first = joined(FakeWorker(talk, "w0"))
    FakeWorker(talk, "w1").join()
    third = Peer(talk, "monitor", "m")
    third.say(wire.Hello("monitor", "m", "m-uid"))
    refusal = third.take(wire.Refused)[-1]
    assert "security.max_sessions" in refusal.message.reason and refusal.sequence == 1
    assert first.hello().session, "who has a session may say hello again"


def test_a_worker_gets_no_more_leases_than_it_may_have_whatever_it_states(converse):
    talk = converse("--security.max_leases", "3")
    worker = joined(FakeWorker(talk), capacity=2**53)
    assert len(worker.grants()) == 3


def test_tokens_of_processes_that_left_long_ago_stay_counted_when_they_are_forgotten(monkeypatch):
    monkeypatch.setattr(limits, "MAX_TALLIES", 10)
    sessions = Peers()
    for number in range(100):
        session = sessions.open(wire.Hello("worker", "w", f"u{number}"), b"", 0.0)
        sessions.tallies[session.uid] = TokenTally(emitted=7, acknowledged=2, refused=1)
        sessions.close(session)
    assert len(sessions.tallies) <= 10
    assert (sessions.unacknowledged_tokens(), sessions.refused_tokens()) == (400, 100)
