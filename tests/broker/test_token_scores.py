"""Token scores in the broker: on disk with the score, over restarts, delivered behind the tokens; never malformed."""

import numpy as np
import pytest

from april import wire
from april.broker.journal.snapshot import freeze, live_positions, thaw
from april.broker.ledger.events import TokensScored
from april.broker.ledger.ledger import Ledger
from april.learner.source import decode_groups
from april.wire import limits
from tests.support.broker_conversation import (
    FakeLearner,
    FakeWorker,
    chunk_arrays,
    finish_evaluation,
    joined,
    observation,
    training,
)

IN_TURNS = ["--environment.name", "calculator", "--environment.max_turn_tokens", "8"]


@pytest.fixture
def talk(converse):
    return converse("--evaluation.prompts", "1", *IN_TURNS)


def score(holder, grant, **columns):
    counts = [{name: len(values) for name, values in columns.items()}]
    values = np.array([value for column in columns.values() for value in column], np.float32)
    holder.say(wire.Report([wire.TokenScored(grant.lease_id, [1.0], [{}], columns=counts)]), [values])


def in_two_turns(worker, grant):
    """A response of six tokens: two of the policy, an observation of one, three of the policy."""
    worker.chunk(grant, 0, 2)
    worker.report([observation(grant.lease_id, 2, chunk_arrays(2, 1)[0])])
    worker.chunk(grant, 3, 3, "stop")


def test_token_scores_outlive_a_restart_and_come_with_the_batch(talk, worker, learner):
    grants = finish_evaluation(worker)
    scored, plain = grants[0], grants[1]
    in_two_turns(worker, scored)
    tops = [[token, -0.5, token + 1, -1.5] for token in range(6)]
    columns = {"teacher": [-1.0, -2.0, 7.0, -3.0, -4.0, -5.0], "of_turn": [0.5, 0.25], "top_k": np.ravel(tops)}
    score(worker, scored, **columns)
    assert worker.answers("done")[-1] == scored.lease_id
    worker.complete(plain)
    talk.restart_broker()
    worker = joined(FakeWorker(talk, worker.name))
    learner = FakeLearner(talk, learner.name)
    learner.hello()
    others = training(worker.grants())
    while not talk.ledger.steps.next:
        worker.complete(others.pop(0))
        others += training(worker.grants())
    batch, arrays = learner.fetch(0)
    assert batch.token_scores == ["of_turn", "teacher", "top_k"]
    groups = decode_groups(batch.groups, [np.array(array) for array in arrays], batch.token_scores)
    found = {(sample.group, sample.index): sample.token_scores for _, group in groups for sample in group}
    mine = found.pop((scored.group, scored.index))
    assert mine["teacher"].tolist() == [-1.0, -2.0, 0.0, -3.0, -4.0, -5.0], "an observation has none"
    assert mine["top_k"].tolist() == [*tops[:2], [0.0] * 4, *tops[3:]], "several numbers of each token, bit by bit"
    assert mine["of_turn"].tolist() == [0.5, 0.5, 0.0, 0.25, 0.25, 0.25]
    assert not any(found.values())


@pytest.mark.parametrize(
    "columns",
    [
        {"a": [1.0] * 5},
        {"a": [1.0] * 9},
        {"a": [1.0] * 6 * 513},
        {"a": [1.0, float("nan")]},
        {str(name): [1.0, 2.0] for name in range(9)},
        {"a": []},
    ],
    ids=[
        "of another sample", "no multiple of its tokens", "too many of each token", "not a number", "too many", "empty",
    ],
)  # fmt: skip
def test_token_scores_that_do_not_fit_the_response_are_refused_and_the_sample_stays_unscored(talk, worker, columns):
    grant = training(worker.grants())[0]
    in_two_turns(worker, grant)
    worker.take(wire.Answers)
    score(worker, grant, **columns)
    ((lease_id, reason),) = worker.answers("rejects")
    assert lease_id == grant.lease_id and reason.startswith("bad score: ")
    assert talk.ledger.groups[grant.group].samples[grant.index].reward is None
    score(worker, grant, a=[1.0] * 6)
    assert worker.answers("done") == [grant.lease_id]


def test_more_values_than_a_report_holds_come_in_parts_that_follow_each_other(talk, worker, monkeypatch):
    monkeypatch.setattr(limits, "MAX_REPORT_BYTES", 40)
    first, second = training(worker.grants())[:2]
    for grant in (first, second):
        in_two_turns(worker, grant)
    worker.take(wire.Answers)
    values = np.arange(24, dtype=np.float32)

    def part(grant, start, end):
        closing = wire.TokenScored(grant.lease_id, [1.0], [{}], columns=[{"a": 24}], start=start)
        worker.say(wire.Report([closing]), [values[start:end]])

    part(first, 0, 10)
    part(first, 20, 24)
    assert [lease for lease, _ in worker.answers("rejects")] == [first.lease_id], "one in between is missing"
    part(first, 0, 10)
    part(second, 10, 20)
    assert [lease for lease, _ in worker.answers("rejects")] == [second.lease_id], "those before are another lease's"
    assert talk.ledger.groups[first.group].token_scores is None, "nothing is kept before the last part"
    for start, end in ((0, 10), (10, 20), (20, 24)):
        part(first, start, end)
    assert worker.answers("done") == [first.lease_id]
    position, length, *_ = talk.ledger.groups[first.group].token_scores[first.index]
    _, [(_, kept)] = talk.service.context.journal.read((position, length))
    assert np.frombuffer(kept, np.float32).tolist() == values.tolist()


def test_their_record_is_kept_and_a_run_without_them_writes_none(talk, worker):
    with_scores, without = training(worker.grants())[:2]
    in_two_turns(worker, with_scores)
    worker.complete(without)
    before = set(live_positions(talk.ledger))
    score(worker, with_scores, a=[1.0] * 6)
    (kept,) = set(live_positions(talk.ledger)) - before
    position, length, number, names = talk.ledger.groups[with_scores.group].token_scores[with_scores.index]
    event, _ = talk.service.context.journal.read((position, length))
    assert isinstance(event, TokensScored) and (kept, number, names) == (position, 0, ["a"])
    assert talk.ledger.groups[without.group].token_scores is None or without.group == with_scores.group
    thawed = Ledger(talk.ledger.rules)
    thaw(freeze(talk.ledger), thawed)
    assert set(live_positions(thawed)) == {*before, position}, "a snapshot has its place, too"
