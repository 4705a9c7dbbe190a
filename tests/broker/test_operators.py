"""Operators' requests to a broker: drain the run, list dead letters, draw their prompts again. The effects survive
restarts."""

import orjson
import pytest

from april import wire
from tests.support.broker_conversation import (
    FakeLearner,
    FakeWorker,
    Peer,
    finish_evaluation,
    joined,
    make_batch,
    training,
)


@pytest.fixture
def talk(converse):
    return converse("--evaluation.prompts", "1", "--broker.attempts", "1", "--broker.max_run_s", "100")


@pytest.fixture
def operator(talk):
    return join_operator(talk)


@pytest.fixture
def worker(talk):
    FakeLearner(talk).join()
    return joined(FakeWorker(talk))


def join_operator(talk):
    operator = Peer(talk, "monitor", "operator")
    operator.hello()
    return operator


def status(operator):
    operator.say(wire.StatusRequest())
    return orjson.loads(operator.take(wire.Status)[-1].arrays[0].tobytes())


def drain(operator, on=True):
    operator.say(wire.Drain(on))
    assert operator.take(wire.Accepted)


def letters(operator):
    operator.say(wire.DeadLettersRequest())
    return orjson.loads(operator.take(wire.DeadLetters)[-1].arrays[0].tobytes())["letters"]


def requeue(operator, *groups):
    operator.say(wire.Requeue(list(groups)))
    return operator.take(wire.Requeued)[-1].message.groups


def kill_one(worker):
    """Fail a training sample for good; returns the grant of that sample and the other grants."""
    dead, *others = finish_evaluation(worker)
    worker.report(closings=[wire.GiveBack(dead.lease_id, 0, "generation_failed", "engine fell over")])
    return dead, others


def is_done(worker, grant):
    """Whether the broker has acknowledged the end of the lease."""
    return grant.lease_id in worker.answers("done")


# --- drain --------------------------------------------------------------------------------------------------


def test_a_drained_broker_has_everything_back_and_hands_out_nothing(talk, operator, worker):
    grants = finish_evaluation(worker)
    worker.chunk(grants[0], 0, 3)
    drain(operator)
    assert status(operator)["drain"] == "draining"
    (abort,) = worker.take(wire.Abort)
    assert all(grant.lease_id <= abort.message.watermark for grant in grants)
    for grant in grants:
        worker.report(closings=[wire.GiveBack(grant.lease_id, 3 if grant is grants[0] else 0, "abort")])
    found = status(operator)
    assert (found["drain"], found["phase"], found["leases"]) == ("drained", "drained", 0)
    assert found["tokens"]["open"] == 3 and found["dead_letters"]["total"] == 0
    talk.tick(60.0)
    assert worker.grants() == []


def test_a_drained_broker_is_drained_when_it_comes_back(talk, operator, worker):
    drain(operator)
    drain(operator)
    talk.restart_broker()
    operator = join_operator(talk)
    worker = joined(FakeWorker(talk))
    assert worker.grants() == []
    talk.tick(talk.config.broker.readopt_s)
    assert status(operator)["drain"] == "drained"
    drain(operator, on=False)
    assert worker.grants()


def test_a_lease_that_its_worker_still_holds_after_the_restart_is_handed_back(talk, operator, worker):
    grants = finish_evaluation(worker)
    drain(operator)
    talk.restart_broker()
    worker = FakeWorker(talk)
    welcome = worker.hello([grant.lease_id for grant in grants])
    assert welcome.lost_lease_ids == [] and grants[0].lease_id <= welcome.watermark
    worker.report(closings=[wire.GiveBack(grants[0].lease_id, 0, "abort")])
    assert is_done(worker, grants[0])


def test_a_delivered_batch_stays_and_is_trained_while_drained(talk, operator, worker):
    for grant in make_batch(worker):
        worker.report(closings=[wire.GiveBack(grant.lease_id, 0, "abort")])
    drain(operator)
    learner = joined(FakeLearner(talk))
    assert learner.fetch(0)
    learner.consume(0)
    worker.hold(1)
    assert worker.grants() == [] and status(operator)["step"] == 1


def test_evaluation_runs_to_its_end_while_draining(operator, worker):
    (evaluation,) = [grant for grant in worker.grants() if grant.evaluation]
    drain(operator)
    worker.complete(evaluation)
    assert is_done(worker, evaluation)


# --- dead letters -------------------------------------------------------------------------------------------


def test_a_dead_sample_is_listed_with_its_error_and_left_in_the_run_folder(talk, operator, worker):
    dead, _ = kill_one(worker)
    (letter,) = letters(operator)
    row = talk.service.prompts.rows[letter["row"]]
    assert (letter["group"], letter["sample"], row.label) == (dead.group, dead.index, dead.label)
    assert (letter["attempts"], letter["error"], letter["outcome"]) == (1, "engine fell over", "discarded")
    assert letter["at"] == pytest.approx(talk.now)
    assert status(operator)["dead_letters"] == {"total": 1, "to_requeue": 1, "waiting": 0}
    talk.service.close(talk.now)
    written = orjson.loads((talk.config.run_dir / "dead_letters.json").read_bytes())
    assert written == {"run": "small", "total": 1, "letters": [letter]}


def test_a_run_that_failed_by_dead_samples_can_be_resumed(talk, operator, worker):
    kill_one(worker)
    assert talk.ledger.dead_letters.groups_in_a_row == 1
    talk.restart_broker()
    assert talk.ledger.dead_letters.groups_in_a_row == 0 and talk.ledger.dead_letters.total == 1


def test_a_requeued_group_is_drawn_again_once_also_after_a_restart(talk, operator, worker):
    dead, _ = kill_one(worker)
    assert requeue(operator, dead.group, 12345) == [dead.group]
    assert requeue(operator, dead.group) == requeue(operator) == []
    opened = len(talk.ledger.groups)
    talk.restart_broker()
    operator = join_operator(talk)
    (letter,) = letters(operator)
    assert letter["outcome"] in ("requeued", "redrawn")
    assert requeue(operator) == []
    worker = FakeWorker(talk)
    FakeLearner(talk).join()
    talk.tick(talk.config.broker.readopt_s)
    worker.join(capacity=100)
    assert dead.label in [grant.label for grant in training(worker.grants()) if grant.group != dead.group]
    assert len(talk.ledger.groups) >= opened


def test_requeue_without_a_group_requeues_all_dead_groups(operator, worker):
    dead, others = kill_one(worker)
    second = next(grant for grant in others if grant.group != dead.group)
    worker.report(closings=[wire.GiveBack(second.lease_id, 0, "scoring_failed", "no verifier")])
    assert requeue(operator) == [dead.group, second.group]


def test_a_read_only_broker_refuses_operators(talk, operator):
    talk.service.run.read_only = "the disk is full"
    for message in (wire.Drain(), wire.Requeue()):
        operator.say(message)
        assert operator.take(wire.Refused)[-1].message.reason == "the disk is full"
    assert status(operator)["read_only"] == "the disk is full"


def test_a_monitor_that_does_not_read_is_answered_no_more_than_its_credit(talk, operator):
    talk.service.context.credit_bytes, read_bytes = 1, 0
    for read_only in ("", "the disk is full"):
        talk.service.run.read_only = read_only
        operator.say(wire.StatusRequest())
        [answer] = operator.take(wire.Status)
        operator.say(wire.DeadLettersRequest())
        assert "unread" in operator.take(wire.Refused)[-1].message.reason
        read_bytes += answer.array_bytes
        operator.say(wire.Heartbeat([], 0, read_bytes), connection=b"control")


# --- bounds -------------------------------------------------------------------------------------------------


def test_a_queue_scan_takes_several_passes_and_counts_everything_once(talk, worker, monkeypatch):
    monkeypatch.setattr("april.broker.telemetry.census.SLICE", 3)
    grants = finish_evaluation(worker)
    worker.chunk(grants[0], 0, 3)
    for _ in range(40):
        talk.tick(0.5)
        worker.say(wire.Heartbeat([grant.lease_id for grant in grants]), connection=b"control")
    queues = talk.service.queue_scanner.latest
    open_samples = [sample for group in talk.ledger.open_groups() for sample in group.samples]
    assert sum(queues.training.values()) == len(open_samples) and queues.training["leased"] == len(grants)
    assert queues.longest_lease_s > 10 and queues.oldest_waiting_s > 10
    assert queues.training_age_s.keys() >= queues.training.keys() and queues.training_age_s["leased"] > 10
