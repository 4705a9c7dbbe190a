"""Feedback in the broker: on disk with the score, over restarts, in the prompt of its own sample; never malformed."""

import numpy as np
import pytest

from april import wire
from april.learner.source import decode_groups
from april.wire.limits import MAX_FEEDBACK_CHARACTERS
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, training

HINT = ["--algorithm.divergence", "forward_kl", "--algorithm.hint", "{feedback}#{prompt}{label}"]


@pytest.fixture
def talk(converse):
    return converse(*HINT)


def say(worker, grant, feedback, **columns):
    counts = [{name: len(values) for name, values in columns.items()}]
    values = np.array([value for column in columns.values() for value in column], np.float32)
    closing = wire.TokenScored(grant.lease_id, [0.0], [{}], columns=counts, feedback=feedback)
    worker.say(wire.Report([closing]), [values])


def finish_batch(talk, worker, grants=()):
    grants = list(grants)
    while not talk.ledger.steps.next:
        grants += training(worker.grants())
        worker.complete(grants.pop(0))


def test_feedback_outlives_a_killed_broker_and_is_in_the_hint_of_its_own_sample(talk, worker, learner):
    told, both, *others = training(worker.grants())[:4]
    for grant in (told, both):
        worker.chunk(grant, 0, 4, "stop")
    say(worker, told, ["1+1"])
    say(worker, both, ["2*2"], grade=[0.5] * 4)
    assert worker.answers("done")[-2:] == [told.lease_id, both.lease_id]
    talk.take_snapshot()
    for grant in others:
        worker.chunk(grant, 0, 4, "stop")
        say(worker, grant, [""])
    batches = []
    for _ in range(2):
        talk.restart_broker()
        worker = joined(FakeWorker(talk, worker.name))
        learner = FakeLearner(talk, learner.name)
        learner.hello()
        finish_batch(talk, worker)
        batches.append(learner.fetch(0))
    assert batches[0] == batches[1], "replayed bit by bit"
    batch, arrays = batches[0]
    groups = decode_groups(batch.groups, [np.array(array) for array in arrays], batch.token_scores)
    decode, found = talk.service.prompts.tokenizer.decode, {}
    for head, group in groups:
        drawn = talk.ledger.groups[head.group]
        label = talk.service.prompts.row(drawn.epoch, drawn.row).label
        for sample in group:
            hinted = decode(sample.hinted_prompt)
            prompt = decode(sample.tokens[: sample.prompt_tokens])
            assert hinted == (f"{sample.feedback}#{prompt}{label}" if sample.feedback else "")
            found[sample.group, sample.index] = sample.feedback
    assert found[told.group, told.index] == "1+1" and found[both.group, both.index] == "2*2"
    assert sum(map(bool, found.values())) == 2, "a sample without feedback has no hint"


def test_each_response_of_a_group_that_is_scored_together_has_its_own(converse):
    talk = converse(*HINT, "--evaluation.prompts", "1", "--reward.name", "group:my_rewards:rank")
    worker = joined(FakeWorker(talk))
    first, second = training(worker.grants())[:2]
    for grant in (first, second):
        worker.chunk(grant, 0, 4, "stop")
    (scoring,) = [grant for grant in worker.grants() if grant.scoring]
    closing = wire.TokenScored(scoring.lease_id, [0.0, 1.0], [{}, {}], columns=[{}, {}], feedback=["1", "2"])
    worker.say(wire.Report([closing]), [np.zeros(0, np.float32)])
    talk.restart_broker()
    samples = talk.ledger.groups[first.group].samples
    assert [(sample.reward, talk.service.context.payloads.feedback(sample)) for sample in samples] == [
        (0.0, "1"),
        (1.0, "2"),
    ]


@pytest.mark.parametrize(
    "feedback", [["1", "1"], ["1" * (MAX_FEEDBACK_CHARACTERS + 1)]], ids=["of another response", "too long"]
)
def test_feedback_that_does_not_fit_is_refused_and_the_sample_stays_unscored(talk, worker, feedback):
    grant = training(worker.grants())[0]
    worker.chunk(grant, 0, 4, "stop")
    say(worker, grant, feedback)
    ((lease_id, reason),) = worker.answers("rejects")
    assert lease_id == grant.lease_id and reason.startswith("bad score: ")
    assert talk.ledger.groups[grant.group].samples[grant.index].reward is None
    say(worker, grant, ["1"])
    assert worker.answers("done") == [grant.lease_id]


def test_feedback_that_leaves_no_room_costs_its_sample_the_hint_and_is_counted(talk, worker, learner, caplog):
    grant, *others = training(worker.grants())
    worker.chunk(grant, 0, 4, "stop")
    say(worker, grant, ["1" * 5000])
    finish_batch(talk, worker, others)
    assert "lost_hints" not in talk.status()["data"]
    for _ in range(2):
        heads = {sample for group in learner.fetch(0)[0].groups for sample in map(told_and_hinted, group.samples)}
        assert heads == {("1" * 5000, b""), ("", b"")}
    assert talk.status()["data"]["lost_hints"] == 1, "once, however often it is delivered"
    assert "for a response of 4 in the model's" in caplog.text and "lower reward.feedback_characters" in caplog.text


def told_and_hinted(head):
    return head.feedback, head.hinted


def test_a_run_without_feedback_writes_no_word_of_it(converse):
    talk = converse()
    worker, learner = joined(FakeWorker(talk)), joined(FakeLearner(talk))
    finish_batch(talk, worker)
    assert {told_and_hinted(sample) for group in learner.fetch(0)[0].groups for sample in group.samples} == {("", b"")}
    assert not any(group.token_scores for group in talk.ledger.groups.values())
