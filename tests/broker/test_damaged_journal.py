"""Damage to an old journal file costs only the groups stored there, each counted as discarded; the run continues. A
read that the system refuses is no damage: it is tried again, and costs nothing."""

import errno
import os
import time

import pytest

from april import config as configuration
from april import wire
from april.broker import verification
from april.broker.journal import files
from april.broker.journal.files import JournalError, Unreadable, file_path
from april.broker.ledger.samples import GroupState
from april.broker.verification import JournalVerifier
from tests.support.broker_conversation import FakeLearner, FakeWorker, damage, finish_evaluation, make_batch
from tests.support.filling_journal import SETTINGS, Run
from tests.support.marks import full


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
    damaged = [next(iter(group.samples[0].chunk_refs)) for group in talk.ledger.deliveries[0]]
    for ref in damaged:
        damage(talk, ref.record, ref.offset)
    learner.say(wire.Fetch(0))
    for _ in range(4):
        talk.tick()
    assert "nothing of batch 0 can be read back" in talk.service.run.over and talk.service.run.state == "failed"
    assert talk.ledger.account.closed and not talk.service.run.read_only
    for ref in damaged:  # a start that replays these records would refuse them
        damage(talk, ref.record, ref.offset)
    for _ in range(3):
        talk.restart_broker()
        again = FakeLearner(talk)
        again.join()
        again.say(wire.Fetch(0))
        [finished] = again.take(wire.Finished)
        assert "nothing of batch 0 can be read back" in finished.message.reason and not again.take(wire.Batch)
        assert talk.service.run.state == "failed" and talk.ledger.account.closed


def test_an_empty_batch_is_sent_to_nobody(talk, worker, learner):
    """A learner may ask for it before the broker's next pass, which ends the run."""
    make_batch(worker)
    for group in list(talk.ledger.deliveries[0]):
        talk.ledger.discard(group, "unreadable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk, "tick", talk.deliver)
        learner.say(wire.Fetch(0))
        assert not learner.take(wire.Batch)


def test_a_batch_that_becomes_unreadable_while_it_is_trained_has_its_line_of_metrics(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    for group in list(talk.ledger.deliveries[0]):
        talk.ledger.discard(group, "unreadable")
    learner.consume(0)
    assert talk.service.recorder.newest["samples"] == talk.service.recorder.newest["reward"] == 0


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
    talk.service._discard_unreadable([group], None)
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


@pytest.mark.parametrize(("what", "error"), [("_has_record", KeyError), ("file_starts", OSError)])
def test_a_group_that_cannot_be_verified_is_tried_again(talk, worker, monkeypatch, what, error):
    """The thread does not end for it, whatever the error."""
    make_batch(worker)
    monkeypatch.setattr(verification, "AGAIN_S", (0.0, 0.0))
    verifier, tries = JournalVerifier(talk.journal.folder, talk.ledger, talk.journal.end), []
    place = verification if what == "file_starts" else verifier
    real = getattr(place, what)

    def first_fails(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise error("refused")
        return real(*arguments)

    monkeypatch.setattr(place, what, first_fails)
    verifier.start()
    verifier._thread.join(60)
    assert len(tries) > 1 and verifier.take() == [] and not verifier._stored


# --- reads that the system refuses ------------------------------------------------------------------------------------


REFUSALS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM]


@pytest.fixture
def refuse(monkeypatch):
    """Function that lets the next calls of `os.pread` fail with an error number; returns the list of those to come."""

    def start(number, calls):
        left, real = [number] * calls, os.pread

        def pread(*arguments):
            if left:
                raise OSError(left.pop(), "refused")
            return real(*arguments)

        monkeypatch.setattr(os, "pread", pread)
        return left

    monkeypatch.setattr(files, "READ_AGAIN_S", (0.0,))
    return start


def verify(talk):
    """Verify everything that the ledger refers to; returns the groups that are found damaged."""
    verifier = JournalVerifier(talk.journal.folder, talk.ledger, below=talk.journal.end)
    verifier.start()
    verifier._thread.join(60)
    assert not verifier._thread.is_alive()
    return verifier.take()


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("calls", [1, full(5), 40])
def test_a_refused_read_behind_a_start_is_tried_again_and_only_a_wrong_checksum_is_damage(
    talk, worker, refuse, monkeypatch, number, calls
):
    monkeypatch.setattr(verification, "AGAIN_S", (0.0,) * 40)
    make_batch(worker)
    bad = talk.ledger.deliveries[0][2]
    damage_tokens(talk, bad.samples[0])
    left, before = refuse(number, calls), files.refused_reads.count
    assert verify(talk) == [bad.id], "whatever was refused was whole"
    assert not left and files.refused_reads.count == before + calls


def test_what_is_refused_for_good_is_kept_and_said(talk, worker, refuse, monkeypatch, caplog):
    monkeypatch.setattr(verification, "AGAIN_S", (0.0, 0.0))
    make_batch(worker)
    refuse(errno.EIO, 100_000)
    assert verify(talk) == [] and "groups in old journal files were not verified" in caplog.text
    assert talk.ledger.account.counts["unreadable"] == 0


def test_a_file_that_is_gone_is_not_damaged(talk, worker):
    """The snapshot process deletes files that nobody needs any more."""
    make_batch(worker)
    path = file_path(talk.journal.folder, 0)
    path.rename(path.with_suffix(".elsewhere"))
    assert verify(talk) == []


@pytest.mark.parametrize("number", REFUSALS)
def test_a_refused_read_of_a_batch_is_tried_again(talk, worker, learner, refuse, number):
    make_batch(worker)
    talk.restart_broker()
    again = FakeLearner(talk)
    again.join()
    left = refuse(number, 1)
    batch, _ = again.fetch(0)
    assert batch.total == 4 and not left and talk.ledger.account.counts["unreadable"] == 0


def test_a_stale_descriptor_is_replaced(talk, worker, learner, monkeypatch):
    make_batch(worker)
    talk.restart_broker()
    stale, real = set(talk.journal._files.values()), os.pread

    def pread(file, *rest):
        if file in stale:
            raise OSError(errno.ESTALE, "stale")
        return real(file, *rest)

    monkeypatch.setattr(os, "pread", pread)
    again = FakeLearner(talk)
    again.join()
    assert again.fetch(0)[0].total == 4


def test_what_cannot_be_read_is_waited_for_and_never_discarded(talk, worker, learner, refuse):
    make_batch(worker)
    talk.restart_broker()
    again = FakeLearner(talk)
    again.join()
    refuse(errno.EIO, 100_000)
    with pytest.raises(Unreadable, match="cannot be read"):
        again.say(wire.Fetch(0))
        talk.tick()
    assert [group.state for group in talk.ledger.deliveries[0]] == [GroupState.DELIVERED] * 4


def test_a_start_without_a_file_that_is_needed_is_refused(config_file):
    run = Run(configuration.load(config_file, [*SETTINGS, "--evaluation.prompts", "1"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeLearner, "durable", lambda *_: None)
        run.train(segments=5)
    lost = run.segments()[1]
    lost.rename(lost.with_suffix(".elsewhere"))
    with pytest.raises(JournalError, match="file with position"):
        run.restart_broker()
    run.journal.close()
    lost.with_suffix(".elsewhere").rename(lost)
    run.start()
    run.journal.close()
