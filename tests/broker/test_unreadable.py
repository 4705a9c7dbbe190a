"""What an old journal file has lost costs the groups it is of, each counted; the broker and all others go on."""

import time

import pytest

from april import wire
from april.broker.ledger.samples import GroupState
from april.broker.verification import Verifier
from tests.broker.conversation import FakeLearner, FakeWorker, finish_evaluation, make_batch
from tests.broker.test_recovery import journal_file


def damage(talk, record, offset):
    """Flip a bit on the disk, in the midst of what lies there."""
    with journal_file(talk).open("r+b") as file:
        file.seek(record + offset)
        byte = file.read(1)[0]
        file.seek(record + offset)
        file.write(bytes([byte ^ 0x10]))


def damage_tokens(talk, sample):
    place = next(iter(sample.places))
    damage(talk, place.record, place.offset)


def lost(talk, *groups):
    """They are discarded, counted, and the books close."""
    assert all(group.state is GroupState.DISCARDED for group in groups)
    assert talk.ledger.counts["unreadable"] == len(groups) and talk.ledger.closed
    assert not talk.service.run.read_only and not talk.service.run.over


def test_a_partial_that_cannot_be_read_is_discarded_with_its_group_and_others_are_handed_out(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    sample = talk.ledger.leases[grant.lease_id].sample
    worker.say(wire.Goodbye())
    damage_tokens(talk, sample)
    again = FakeWorker(talk, "w1")
    again.join()
    talk.tick()
    lost(talk, sample.group)
    assert {one.group for one in again.grants()}.isdisjoint({sample.group.id}) and talk.ledger.leases


@pytest.mark.parametrize("of", ["tokens", "prompt"])
def test_a_batch_goes_without_a_group_that_cannot_be_read(talk, worker, learner, of):
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
    assert talk.ledger.frontier == 1 and talk.ledger.closed and not talk.service.run.read_only


def test_a_batch_of_which_nothing_is_left_ends_the_run_with_a_sentence(talk, worker, learner):
    make_batch(worker)
    for group in talk.ledger.deliveries[0]:
        damage_tokens(talk, group.samples[0])
    learner.say(wire.Fetch(0))
    for _ in range(4):
        talk.tick()
    assert "nothing of batch 0 can be read back" in talk.service.run.over and talk.service.run.state == "failed"
    assert talk.ledger.closed and not talk.service.run.read_only


def test_what_a_start_has_not_read_is_read_behind_it_and_damage_is_found_before_anybody_needs_it(talk, worker, learner):
    make_batch(worker)
    bad = talk.ledger.deliveries[0][2]
    damage_tokens(talk, bad.samples[0])
    talk.service.verifier = verifier = Verifier(talk.journal.folder, talk.ledger, below=talk.journal.end)
    verifier.start()
    verifier._thread.join(60)
    assert bad.state is GroupState.DELIVERED, "the thread changes nothing by itself"
    talk.tick()
    lost(talk, bad)
    batch, _ = learner.fetch(0)
    assert bad.id not in [head.group for head in batch.groups]


def test_only_what_lies_below_the_snapshot_is_read_again(talk, worker, learner):
    make_batch(worker)
    damage_tokens(talk, talk.ledger.deliveries[0][0].samples[0])
    for below in (0, 1):
        verifier = Verifier(talk.journal.folder, talk.ledger, below)
        verifier.start()
        verifier._thread.join(60)
        assert verifier.take() == []


def test_a_trained_group_is_missed_only_where_a_learner_goes_back_to_it(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    group = talk.ledger.deliveries[0][1]
    damage_tokens(talk, group.samples[0])
    talk.service._lose([group], None, talk.now)
    assert group.state is GroupState.TRAINED and not talk.ledger.counts["unreadable"]
    again = FakeLearner(talk, "again")
    again.join(step=0)
    batch, _ = again.fetch(0)
    assert batch.total == 3
    lost(talk, group)


def test_a_verifier_ends_with_its_broker(talk, worker):
    make_batch(worker)
    verifier = Verifier(talk.journal.folder, talk.ledger, below=talk.journal.end)
    verifier.start()
    began = time.monotonic()
    verifier.close()
    assert not verifier._thread.is_alive() and time.monotonic() - began < 30
