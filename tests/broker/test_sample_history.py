"""A batch carries the history of each of its samples (workers and times), also after a restart of the broker."""

from april import wire
from april.broker.journal.snapshot import freeze
from april.broker.telemetry import sample_history
from tests.support.broker_conversation import (
    FakeLearner,
    FakeWorker,
    finish_evaluation,
    joined,
    make_batch,
    train,
    training,
)


def history(batch):
    return {(head.group, sample.index): sample for head in batch.groups for sample in head.samples}


def until_batch(talk, *workers):
    """Complete granted samples one by one until a batch is delivered: half a second to generate each, a quarter to
    score it."""
    before = talk.ledger.steps.next
    while talk.ledger.steps.next == before:
        worker = next(worker for worker in workers if any(worker.waiting))
        grant = worker.waiting.pop(0)
        talk.tick(0.5)
        worker.chunk(grant, grant.arrays[1].size, 3, "stop")
        talk.tick(0.25)
        worker.score(grant, 0.5, correct=1.0)
        for other in workers:
            other.waiting += training(other.grants())


def test_spans_survive_a_kill_and_a_snapshot(talk, worker, learner):
    worker.waiting = finish_evaluation(worker)
    first, *_ = worker.waiting
    start = talk.now
    talk.tick(1.0)
    worker.chunk(first, 0, 5)
    worker.hold(0, capacity=1)
    worker.report(closings=[wire.GiveBack(first.lease_id, 5, "leave")])
    other = joined(FakeWorker(talk, "w1", uid="w1/0123"))
    other.waiting = training(other.grants())
    assert (first.group, first.index) in {(grant.group, grant.index) for grant in other.waiting}
    until_batch(talk, other, worker)
    batch = learner.fetch(0)
    sample = history(batch[0])[first.group, first.index]
    left, went_on, scored = sample.spans
    assert (left.activity, left.holder, left.start, left.end, left.outcome) == ("generate", "w0-uid", 0, 5, "leave")
    assert (went_on.holder, went_on.start, went_on.end, went_on.outcome) == ("w1", 5, 8, "stop")
    assert (scored.activity, scored.holder, scored.outcome) == ("score", "w1", "scored")
    assert left.ended - left.began == 1.0 and scored.ended - scored.began == 0.25
    assert sample.details == {"correct": 1.0}
    head = next(head for head in batch[0].groups if head.group == first.group)
    assert head.opened_at <= start < head.delivered_at <= talk.now
    for with_snapshot in (False, True):
        if with_snapshot:
            position = talk.journal.rotate()
            talk.service.snapshots.store.write(position, freeze(talk.ledger, talk.service.history.freeze()))
        talk.restart_broker()
        again = FakeLearner(talk, learner.name)
        again.hello()
        assert again.fetch(0) == batch
    again.consume(0)
    again.durable(1)
    talk.restart_broker()
    assert not any(talk.service.history.of_group(group).delivered_at for group in talk.ledger.groups.values())


def test_holders_that_no_sample_names_any_more_are_forgotten(talk, worker, learner, monkeypatch):
    """Of processes that come and go; the next one takes the place of one that is forgotten."""
    monkeypatch.setattr(sample_history, "MOST_HOLDERS", 8)
    history = talk.service.history
    for number in range(20):
        history._holder_index(f"gone-{number}")
    train(talk, worker, learner, 0)
    learner.durable(1)
    assert set(history._holders) == {"", "w0-uid"}
    before = len(history._holders)
    history._holder_index("new")
    assert len(history._holders) == before
    make_batch(worker)
    batch = learner.fetch(1)
    assert {span.holder for group in batch[0].groups for sample in group.samples for span in sample.spans} == {"w0-uid"}
