"""Prompts that a trainer submits are journaled before they are acknowledged, drawn in order, and never lost."""

import msgspec
import numpy as np
import pytest

from april import wire
from april.broker.journal.snapshot import live_positions
from tests.support.broker_conversation import FakeLearner, FakeWorker, finish_evaluation, joined, training

SUBMITTED = ["--data.source", "submitted", "--evaluation.prompts", "1", "--schedule.over_sampling_batch_size", "6"]


@pytest.fixture(params=["april", "continuous"])
def kind(request):
    return request.param


@pytest.fixture
def talk(converse, kind):
    keys = SUBMITTED if kind == "april" else [*SUBMITTED[:4], "--schedule.kind", kind]
    return converse(*keys)


def submit(learner, first, count, extra=b"", reward=""):
    """Submit `count` prompts from number `first` on; prompt k has the token ids k % 15 + 1 and k % 15 + 2, and the
    label k. Returns the acknowledged counts."""
    numbers = range(first, first + count)
    ids = np.array([number % 15 + more for number in numbers for more in (1, 2)], np.int32)
    prompts = [wire.Submission(2, str(number), reward, extra) for number in numbers]
    learner.say(wire.Submit(first, prompts), [ids])
    return [received.message.count for received in learner.take(wire.Submitted)]


def complete_all(worker):
    """Complete all samples that the worker is granted; returns the labels of their prompts."""
    grants, labels = finish_evaluation(worker), []
    while grants := grants + training(worker.grants()):
        labels.append(grants[0].label)
        worker.complete(grants.pop(0))
    return labels


def numbers_of(batch):
    return [head.prompt_number for head in batch.groups]


def test_groups_are_opened_in_the_trainer_s_order_and_return_the_submitted_extra(worker, learner):
    assert complete_all(worker) == [], "nothing to do before prompts come"
    assert submit(learner, 0, 0) == [0] and submit(learner, 0, 4, msgspec.msgpack.encode({"uid": 7})) == [4]
    complete_all(worker)
    batch, arrays = learner.fetch(0)
    assert numbers_of(batch) == [0, 1, 2, 3] and arrays[0] == [1, 2]
    assert {msgspec.msgpack.decode(head.extra)["uid"] for head in batch.groups} == {7}
    learner.consume(0)


def test_a_label_goes_with_the_grant_and_a_repeated_prompt_is_ignored(worker, learner):
    assert submit(learner, 0, 3) == [3] and submit(learner, 0, 3) == [3] and submit(learner, 1, 3) == [4]
    assert sorted(complete_all(worker)) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert submit(learner, 9, 1) == [], "a prompt in between is missing"
    assert "prompt 9 does not follow 4 submitted ones" in learner.take(wire.Refused)[-1].message.reason


def test_prompts_missing_for_a_batch_are_requested_from_the_trainer(talk, worker, learner):
    submit(learner, 0, 3)
    complete_all(worker)
    batch, _ = learner.fetch(0)
    assert batch.total == 0 and not talk.service.run.over
    submit(learner, 3, 1)
    complete_all(worker)
    assert numbers_of(learner.fetch(0)[0]) == [0, 1, 2, 3]


def test_at_the_end_of_the_run_no_prompts_are_asked_for(talk, worker, learner):
    submit(learner, 0, 4 * talk.config.schedule.max_steps)
    for step in range(talk.config.schedule.max_steps):
        complete_all(worker)
        assert learner.fetch(step)[0].total == 4
        learner.consume(step)
        worker.hold(step + 1)
    assert learner.fetch(talk.config.schedule.max_steps) is None and not learner.take(wire.Refused)
    complete_all(worker)
    assert talk.service.run.state == "finished"


def test_prompts_that_come_late_join_the_round(talk, worker, learner, kind):
    submit(learner, 0, 2)
    submit(learner, 2, 4)
    assert kind != "april" or talk.ledger.account.counts["open"] == 6, "all of N'"
    complete_all(worker)
    assert learner.fetch(0)[0].total == 4


def test_a_restart_of_broker_or_trainer_neither_loses_nor_repeats_a_prompt(talk, worker, learner):
    submit(learner, 0, 6)
    complete_all(worker)
    before = learner.fetch(0)
    talk.restart_broker()
    worker, learner = FakeWorker(talk), FakeLearner(talk)
    learner.join()
    assert submit(learner, 0, 6) == [6], "it may say the same again"
    assert learner.fetch(0) == before
    learner.consume(0)
    worker.join(step=1)
    learner.durable(1)
    assert sorted(talk.ledger.prompts.submitted) == [4, 5], "of the others nobody will ask again"
    assert {position for position, _ in talk.ledger.prompts.submitted.values()} <= set(live_positions(talk.ledger))


@pytest.mark.parametrize(
    "prompts, ids, why",
    [
        ([wire.Submission(3, "")], [1, 2], "of as many token ids as they say"),
        ([wire.Submission(0, "")], [], "between 1 and"),
        ([wire.Submission(1, "")], [-1], "token ids of a prompt are between 0 and"),
        ([wire.Submission(1, "")], [10**6], "token ids of a prompt are between 0 and"),
        ([wire.Submission(1, "", "no_such_verifier")], [1], "is not among the verifiers"),
    ],
)
def test_a_submission_with_an_invalid_prompt_is_refused_as_a_whole(talk, learner, prompts, ids, why):
    learner.say(wire.Submit(0, [wire.Submission(1, "fine"), *prompts]), [np.array([1, *ids], np.int32)])
    assert why in learner.take(wire.Refused)[-1].message.reason
    assert talk.ledger.prompts.submitted_count == 0


def test_a_run_that_draws_from_files_takes_no_prompts(converse):
    learner = joined(FakeLearner(converse()))
    assert submit(learner, 0, 1) == []
    assert "set data.source to 'submitted'" in learner.take(wire.Refused)[-1].message.reason
