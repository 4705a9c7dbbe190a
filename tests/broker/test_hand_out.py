"""Samples are handed out to workers in the order of the schedule, also in a run of the schedule `continuous`, which has
no rounds."""

from itertools import pairwise

import pytest

from april import wire
from april.broker.handlers import workers as worker_handler
from april.broker.ledger.samples import TO_GENERATE
from april.observe.report.run_folder import read_records
from april.wire.message import Version
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined

CONTINUOUS = ["--schedule.kind", "continuous", "--schedule.in_flight", "6", "--schedule.max_staleness", "1"]


@pytest.fixture
def talk(converse):
    """A conversation with 4 groups of 2 in a batch, 6 samples in flight, staleness at most 1, 8 evaluation prompts and
    3 steps."""
    return converse(*CONTINUOUS)


def counts(grants):
    """Number of grants as (evaluation, training)."""
    return sum(grant.evaluation for grant in grants), sum(not grant.evaluation for grant in grants)


def work_until(worker, condition):
    """Complete all samples that the worker is granted until the condition holds."""
    for _ in range(500):
        if condition():
            return
        for grant in worker.grants():
            worker.complete(grant)
        worker.conversation.tick()
    raise AssertionError("it never came to that")


def test_evaluation_has_its_share_of_the_slots_and_no_more_while_training_waits(worker):
    assert counts(worker.grants()) == (5, 5)


def test_evaluation_takes_slots_that_would_stay_idle(talk):
    worker = joined(FakeWorker(talk), capacity=14)
    assert counts(worker.grants()) == (8, 6)


def test_evaluation_is_no_part_of_what_is_in_flight(talk, worker):
    for grant in worker.grants():
        if grant.evaluation:
            worker.complete(grant)
    assert talk.ledger.leases.generating == 6


def test_evaluation_tokens_are_no_generated_ones(talk, worker):
    for grant in worker.grants():
        if grant.evaluation:
            worker.complete(grant, count=4)
    account = talk.ledger.account.summary()
    assert (account["evaluation"], account["generated"]) == (20, 0) and talk.ledger.account.closed


def test_a_lost_sample_is_granted_before_other_partials_with_its_tokens(talk, worker):
    left, *_, lost = [grant for grant in worker.grants() if not grant.evaluation]
    for grant in (left, lost):
        worker.chunk(grant, 0, 5)
    talk.ledger.end_lease(left.lease_id, "leave")
    talk.ledger.end_lease(lost.lease_id, "lost")
    worker.say(wire.Heartbeat(), connection=b"control")
    first, second = worker.grants()
    assert [(grant.group, grant.index) for grant in (first, second)] == [(g.group, g.index) for g in (lost, left)]
    assert first.max_new_tokens == second.max_new_tokens == 19


def test_many_free_workers_are_filled_over_several_passes_each_with_its_sync(converse, monkeypatch):
    monkeypatch.setattr(worker_handler, "PASS_GRANTS", 4)
    talk = converse(*CONTINUOUS)
    worker, synced = FakeWorker(talk), talk.deliver
    turns = []
    monkeypatch.setattr(talk, "deliver", lambda: (synced(), turns.append(len(talk.ledger.leases))))
    worker.join(capacity=14)
    granted = [after - before for before, after in pairwise(turns) if after > before][-4:]
    assert granted == [4, 4, 4, 2]


def test_a_worker_with_old_weights_does_not_keep_others_waiting(converse):
    talk = converse("--evaluation.prompts", "1")
    behind, learner = joined(FakeWorker(talk, "behind"), capacity=50), joined(FakeLearner(talk))
    work_until(behind, lambda: talk.ledger.steps.next == 1)
    assert learner.fetch(0)
    learner.consume(0)
    for lease_id in list(talk.ledger.leases):
        behind.report(closings=[wire.GiveBack(lease_id, talk.ledger.leases[lease_id].sample.length, "abort")])
    assert not samples(behind.grants()), "batch 1 is made with newer weights than it has"
    ahead = joined(FakeWorker(talk, "ahead"), step=1)
    assert samples(ahead.grants())


def round_of_new_weights(talk):
    """Set up a round whose samples wait for the weights of step 1, and two workers without leases; returns (worker,
    worker, number of unfinished samples)."""
    first, last = (FakeWorker(talk, name) for name in ("first", "last"))
    learner = FakeLearner(talk)
    for one in (first, last, learner):
        one.join()
    for _ in range(100):
        if talk.ledger.steps.next:
            break
        for worker in (first, last):
            for grant in worker.grants():
                worker.complete(grant)
    for worker in (first, last):
        mine = [(key, lease) for key, lease in talk.ledger.leases.items() if lease.worker == worker.uid]
        for lease_id, lease in mine:
            worker.report(closings=[wire.GiveBack(lease_id, lease.sample.length, "abort")])
        worker.grants()
    assert learner.fetch(0)
    learner.consume(0)
    talk.tick()
    unfinished = [s for group in talk.ledger.open_groups() for s in group.samples if s.state in TO_GENERATE]
    assert talk.ledger.rounds.open and not talk.ledger.leases.generating and len(unfinished) > 4
    return first, last, len(unfinished)


def take_weights(worker, loaded_in_s):
    worker.version = Version(0, 1)
    worker.say(wire.WorkerCapacity(worker.version, 10, loaded_in_s))


def test_the_first_worker_with_new_weights_leaves_the_others_their_share(converse):
    talk = converse("--evaluation.prompts", "1")
    first, last, waiting = round_of_new_weights(talk)
    take_weights(first, loaded_in_s=2.0)
    half = -(-waiting // 2)
    assert len(samples(first.grants())) == half
    talk.tick(1.9)
    assert not first.grants()
    take_weights(last, loaded_in_s=3.9)
    assert len(samples(last.grants())) == waiting - half and not first.grants()


def test_a_worker_that_takes_twice_as_long_to_load_is_not_waited_for(converse):
    talk = converse("--evaluation.prompts", "1")
    first, _last, waiting = round_of_new_weights(talk)
    take_weights(first, loaded_in_s=2.0)
    talk.tick(2.1)
    assert len(samples(first.grants())) == min(10, waiting)


def round_with_one_sample_left(talk):
    """Set up round 1 with one sample that still generates, while the learner has trained step 0; returns (worker,
    worker, the one that has the sample, its grant)."""
    first, last, learner = FakeWorker(talk, "first"), FakeWorker(talk, "last"), FakeLearner(talk)
    for one in (first, last, learner):
        one.join()

    def granted():
        return [(worker, grant) for worker in (first, last) for grant in worker.grants()]

    while not talk.ledger.steps.next:
        for worker, grant in granted():
            worker.complete(grant)
    *held, (holder, left) = granted()
    for worker, grant in held:
        worker.complete(grant)
    assert learner.fetch(0)
    learner.consume(0)
    talk.tick()
    return first, last, holder, left


def test_the_next_round_has_a_share_of_its_own_however_little_was_left_of_the_last_one(converse):
    talk = converse("--evaluation.prompts", "1", "--schedule.kind", "sync", "--schedule.over_sampling_batch_size", "4",
                    "--schedule.overlap", "true")  # fmt: skip
    first, _last, holder, left = round_with_one_sample_left(talk)
    take_weights(first, loaded_in_s=8.0)
    holder.complete(left)
    talk.tick(0.1)
    assert talk.ledger.rounds.number == 2
    unleased = sum(map(talk.ledger.open_samples.count, TO_GENERATE))
    assert [len(samples(first.grants())), unleased] == [4, 4], "half of the round's 8 samples"


@pytest.fixture
def two(converse):
    """(conversation, worker `right`, worker `left`): each had three samples and has handed them back; `left` has
    generated 5 tokens of each of its training samples."""
    talk = converse(*CONTINUOUS, "--evaluation.prompts", "1")
    right, left = (FakeWorker(talk, name) for name in ("right", "left"))
    talk.ledger.start_drain()
    for worker in (right, left):
        worker.join()
    talk.ledger.end_drain()
    talk.tick()
    talk.ledger.start_drain()
    for worker in (right, left):
        for grant in worker.grants():
            if worker is left and not grant.evaluation:
                worker.chunk(grant, 0, 5)
            worker.give_back(grant, 5 * (worker is left and not grant.evaluation), "abort")
    talk.ledger.end_drain()
    return talk, right, left


def samples(grants):
    return [(grant.group, grant.index) for grant in grants if not grant.evaluation]


def test_a_partial_goes_back_to_the_worker_that_has_its_prefix_in_cache(two):
    talk, right, left = two
    partials = [s for group in talk.ledger.open_groups() for s in group.samples if s.length]
    talk.tick()
    assert samples(left.grants()) == [(s.group.id, s.index) for s in partials] and len(partials) == 3
    assert len(samples(right.grants())) == 3
    assert talk.ledger.account.resumed == {"cached": 15}


def test_a_partial_does_not_wait_for_a_worker_without_room_or_one_that_has_gone(two):
    talk, right, left = two
    left.hold(0, capacity=1)
    assert len(samples(left.grants())) == 1 and len(samples(right.grants())) == 5
    assert talk.ledger.account.resumed == {"cached": 5, "moved": 10}
    left.say(wire.Goodbye())
    assert len(samples(right.grants())) == 1
    assert talk.ledger.account.resumed == {"cached": 5, "moved": 15}


def test_new_weights_and_failures_leave_no_prefix_in_a_cache(two):
    talk, _, left = two
    (sample, *_) = (s for group in talk.ledger.open_groups() for s in group.samples if s.length)
    assert (sample.cached_by(0), sample.cached_by(1)) == (left.uid, "")
    lease = talk.ledger.lease(sample, left.uid, 0, float("inf"))
    talk.ledger.end_lease(lease.id, "lost")
    assert sample.cached_by(0) == ""


def test_generation_goes_on_while_the_learner_has_a_batch_until_the_bound_is_reached(talk, worker, learner):
    work_until(worker, lambda: talk.ledger.steps.next == 1)
    assert talk.status()["phase"] == "generating, training"
    for _ in range(50):
        for grant in worker.grants():
            worker.complete(grant)
    assert not talk.ledger.leases.generating and talk.ledger.steps.next == 1
    assert len(talk.ledger.ready) == 4, "batch 1 is the last that may train what version 0 has generated"
    assert talk.status()["phase"] == "training"


def test_a_run_without_rounds_comes_to_its_end(talk, worker, learner):
    staleness = []
    for step in range(3):
        work_until(worker, lambda step=step: talk.ledger.steps.next > step)
        assert learner.fetch(step)
        learner.consume(step)
        worker.hold(step + 1)
        staleness.append(read_records(talk.config.run_dir / "metrics.jsonl")[-1]["staleness"]["max"])
    assert worker.take(wire.Abort), "what is unfinished at the last batch comes back"
    worker.abort_all()
    work_until(worker, lambda: talk.service.run.over)
    assert talk.service.run.state == "finished" and max(staleness) <= 1 and talk.ledger.account.closed
    assert [entry["step"] for entry in talk.ledger.evaluated.values()] == [0, 3]


@pytest.mark.parametrize(
    "other", [["--schedule.kind", "april"], ["--schedule.kind", "sync", "--over-sampling-batch-size", "4"]]
)
def test_a_run_may_go_on_under_another_schedule(talk, worker, learner, converse, other):
    work_until(worker, lambda: talk.ledger.steps.next == 1)
    talk.journal.close()
    again = converse(*other, "--schedule.max_staleness", "1")
    assert again.ledger.account.summary() == talk.ledger.account.summary()
    worker, learner = joined(FakeWorker(again)), joined(FakeLearner(again))
    for step in range(3):
        work_until(worker, lambda step=step: again.ledger.steps.next > step)
        assert learner.fetch(step)
        learner.consume(step)
        worker.abort_all()
        worker.hold(step + 1)
    assert again.ledger.account.closed and not again.ledger.account.discarded
