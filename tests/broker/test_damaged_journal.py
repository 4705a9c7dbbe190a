"""Damage to an old journal file costs only the groups stored there, each counted as discarded; the run continues."""

import time

import pytest

from april import wire
from april.broker.ledger.samples import GroupState
from april.broker.verification import JournalVerifier
from tests.support.broker_conversation import FakeLearner, FakeWorker, damage, finish_evaluation, make_batch


def damage_tokens(talk, sample):
    ref = next(iter(sample.chunk_refs))
    damage(talk, ref.record, ref.offset)


def lost(talk, *groups):
    """Check that the groups are discarded and counted, and that generated tokens equal the sum of their states."""
    assert all(group.state is GroupState.DISCARDED for group in groups)
    assert talk.ledger.account.counts["unreadable"] == len(groups) and talk.ledger.account.closed
    assert not talk.service.run.read_only and not talk.service.run.over


def test_an_unreadable_partial_is_discarded_with_its_group_and_others_are_handed_out(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    sample = talk.ledger.leases[grant.lease_id].sample
    worker.say(wire.Goodbye())
    damage_tokens(talk, sample)
    again = FakeWorker(talk, "w1")
    again.join()
    talk.tick()
    lost(talk, sample.group)
    assert {grant.group for grant in again.grants()}.isdisjoint({sample.group.id}) and talk.ledger.leases


@pytest.mark.parametrize("of", ["tokens", "prompt"])
def test_an_unreadable_group_is_left_out_of_its_batch(talk, worker, learner, of):
    make_batch(worker)
    talk.restart_broker()
    bad = talk.ledger.deliveries[0][1]
    if of == "tokens":
        damage_tokens(talk, bad.samples[1])
    else:
        position, length = bad.prompt
        damage(talk, position, length - 1)
    again = FakeLearner(talk)
    again.join()
    batch, _ = again.fetch(0)
    assert bad.id not in [head.group for head in batch.groups] and batch.total == len(batch.groups) == 3
    lost(talk, bad)
    again.consume(0)
    assert talk.ledger.steps.frontier == 1 and talk.ledger.account.closed and not talk.service.run.read_only


def test_a_batch_without_readable_groups_ends_the_run_with_a_clear_error(talk, worker, learner):
    make_batch(worker)
    for group in talk.ledger.deliveries[0]:
        damage_tokens(talk, group.samples[0])
    learner.say(wire.Fetch(0))
    for _ in range(4):
        talk.tick()
    assert "nothing of batch 0 can be read back" in talk.service.run.over and talk.service.run.state == "failed"
    assert talk.ledger.account.closed and not talk.service.run.read_only


def test_files_that_a_start_skipped_are_verified_later_and_damage_is_found_before_it_is_needed(talk, worker, learner):
    make_batch(worker)
    bad = talk.ledger.deliveries[0][2]
    damage_tokens(talk, bad.samples[0])
    talk.service.verifier = verifier = JournalVerifier(talk.journal.folder, talk.ledger, below=talk.journal.end)
    verifier.start()
    verifier._thread.join(60)
    assert bad.state is GroupState.DELIVERED, "the thread changes nothing by itself"
    talk.tick()
    lost(talk, bad)
    batch, _ = learner.fetch(0)
    assert bad.id not in [head.group for head in batch.groups]


def test_only_records_before_the_snapshot_are_verified(talk, worker, learner):
    make_batch(worker)
    damage_tokens(talk, talk.ledger.deliveries[0][0].samples[0])
    for below in (0, 1):
        verifier = JournalVerifier(talk.journal.folder, talk.ledger, below)
        verifier.start()
        verifier._thread.join(60)
        assert verifier.take() == []


def test_an_unreadable_trained_group_matters_only_if_a_learner_goes_back_to_it(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    group = talk.ledger.deliveries[0][1]
    damage_tokens(talk, group.samples[0])
    talk.service._discard_unreadable([group], None, talk.now)
    assert group.state is GroupState.TRAINED and not talk.ledger.account.counts["unreadable"]
    again = FakeLearner(talk, "again")
    again.join(step=0)
    batch, _ = again.fetch(0)
    assert batch.total == 3
    lost(talk, group)


def test_a_verifier_ends_with_its_broker(talk, worker):
    make_batch(worker)
    verifier = JournalVerifier(talk.journal.folder, talk.ledger, below=talk.journal.end)
    verifier.start()
    began = time.monotonic()
    verifier.close()
    assert not verifier._thread.is_alive() and time.monotonic() - began < 30
