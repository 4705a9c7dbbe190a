"""A worker's report holds the new tokens of many samples; an error in one row does not affect the other rows."""

import numpy as np
import pytest

from april import wire
from april.broker.ledger.events import RowsAccepted
from april.wire.rows import ROW, read_rows
from tests.support.broker_conversation import FakeWorker, chunk, chunk_arrays, joined, training


@pytest.fixture
def leases(worker):
    return training(worker.grants())[:4]


def recorded(talk):
    """Number of rows in each `RowsAccepted` record of the journal."""
    talk.journal.sync()
    return [len(event.table) // ROW.size for event, _ in talk.journal.replay() if isinstance(event, RowsAccepted)]


def test_a_refused_row_does_not_affect_the_others(talk, worker, leases):
    good, wrong, ahead, ended = leases
    nobodys = chunk(12345, 0, worker.version, chunk_arrays(0, 2))
    not_a_number = chunk(wrong.lease_id, 0, worker.version, [np.ones(2, "i4"), np.full(2, np.nan, "f4")])
    rows = [not_a_number, nobodys, worker.new_tokens(ahead, 5, 1), worker.new_tokens(ended, 0, 25)]
    worker.report([rows[0], worker.new_tokens(good, 0, 3), *rows[1:], worker.new_tokens(good, 3, 2)])
    (answers,) = [received.message for received in worker.take(wire.Answers)]
    assert answers.acks == [(good.lease_id, 5)] and answers.nacks == [(ahead.lease_id, 0)]
    assert {lease_id: reason.split(":")[0] for lease_id, reason in answers.rejects} == {
        wrong.lease_id: "bad row", 12345: "the lease is not current", ended.lease_id: "chunk refused",
    }  # fmt: skip
    assert recorded(talk) == [2] and talk.ledger.account.closed
    assert ended.lease_id not in talk.ledger.leases and wrong.lease_id in talk.ledger.leases


def test_rows_behind_a_refused_row_of_their_lease_are_dropped_silently(talk, worker, leases):
    ahead, wrong, other = leases[:3]
    negative = chunk(wrong.lease_id, 0, worker.version, [-np.ones(2, "i4"), np.zeros(2, "f4")])
    rows = [worker.new_tokens(ahead, start, 1) for start in (2, 3)] + [negative, worker.new_tokens(wrong, 0, 3)]
    worker.report([*rows, worker.new_tokens(other, 0, 1)])
    (answers,) = [received.message for received in worker.take(wire.Answers)]
    assert (answers.acks, answers.nacks) == ([(other.lease_id, 1)], [(ahead.lease_id, 0)])
    assert [(lease_id, reason[:8]) for lease_id, reason in answers.rejects] == [(wrong.lease_id, "bad row:")]
    assert wrong.lease_id in talk.ledger.leases, "only its tokens were refused"


def test_a_logprob_above_zero_is_refused_but_for_rounding(worker, leases):
    rounded, wrong = (
        chunk(lease.lease_id, 0, worker.version, [np.ones(2, "i4"), np.array([-0.5, above], "f4")])
        for lease, above in zip(leases, (1e-4, 0.1), strict=False)
    )
    worker.report([rounded, wrong])
    (answers,) = [received.message for received in worker.take(wire.Answers)]
    assert answers.acks == [(leases[0].lease_id, 2)]
    assert answers.rejects == [(leases[1].lease_id, "bad row: a logprob is above 0")]


@pytest.mark.parametrize("logprob", [-1.1e4, -1e30, np.finfo("f4").min])
def test_a_logprob_that_nothing_is_drawn_with_is_refused(worker, leases, logprob):
    worker.report([chunk(leases[0].lease_id, 0, worker.version, [np.ones(2, "i4"), np.array([-0.5, logprob], "f4")])])
    assert worker.answers("rejects") == [(leases[0].lease_id, "bad row: a logprob is below -10000")]


def test_times_that_are_not_in_the_run_are_unknown(talk, worker, leases):
    """They would stretch each picture of the run to them; the tokens are right all the same, and a worker whose clock
    is wrong goes on."""
    for number, away in enumerate((-1e300, -2e5, 1e5, 1e300)):
        row, payload = worker.new_tokens(leases[0], 3 * number, 3)
        worker.report([(row._replace(time=talk.now + away), payload)])
        assert worker.take(wire.Answers)[-1].message.acks == [(leases[0].lease_id, 3 * number + 3)]
        worker.say(wire.ActivitySpan("generate", talk.now + away, talk.now + away))
        worker.say(wire.WorkerCapacity(worker.version, 1, away))
    worker.say(wire.ActivitySpan("generate", float("nan"), talk.now))
    worker.say(wire.WorkerCapacity(worker.version, 2, float("nan")))
    (peer,) = talk.service.peers.by_id.values()
    spans = talk.service.recorder._step.spans
    assert not worker.take(wire.Refused) and peer.capacity == 2 and {span["kind"] for span in spans} == {"joined"}
    row, payload = worker.new_tokens(leases[0], 12, 3)
    worker.report([(row._replace(time=talk.now - 60.0), payload)])
    assert worker.take(wire.Answers)[-1].message.acks == [(leases[0].lease_id, 15)]
    talk.journal.sync()
    events = [event for event, _ in talk.journal.replay() if isinstance(event, RowsAccepted)]
    times = [row.time for event in events for row in read_rows(event.table)]
    assert times == [0.0] * 4 + [talk.now - 60.0]


def test_a_row_with_a_wrong_checksum_is_refused(worker, leases):
    row, payload = worker.new_tokens(leases[0], 0, 3)
    worker.report([(row, payload[:-1] + bytes([payload[-1] ^ 1]))])
    assert worker.answers("rejects") == [(leases[0].lease_id, "bad row: its checksum does not agree")]


def test_a_report_ends_leases_behind_their_last_tokens(worker, leases):
    lease = leases[0]
    rows, score = [worker.new_tokens(lease, 0, 3, "stop")], wire.Scored(lease.lease_id, [1.0], [{}])
    worker.report(rows, [score])
    assert worker.take(wire.Answers)[-1].message == wire.Answers([(lease.lease_id, 3)], [lease.lease_id])


def test_a_prompt_travels_once_however_many_of_its_samples_are_granted(talk):
    worker = joined(FakeWorker(talk))
    (received,) = worker.take(wire.Grants)
    grants, tasks = received.message.grants, received.message.tasks
    assert len({task.group for task in tasks}) == len(tasks) < len(grants)
    assert len(received.arrays) == len(tasks) + len(grants)
