"""Observations of an environment in the broker: stored like chunks, left out of the counts of sampled tokens, and sent
again with the next grant."""

import msgspec
import numpy as np
import pytest

from april import wire
from april.wire.message import Version
from tests.support.broker_conversation import (
    FakeLearner,
    FakeScorer,
    FakeWorker,
    chunk_arrays,
    finish_evaluation,
    joined,
    observation,
    training,
)

ENVIRONMENT = ["--environment.name", "calculator", "--environment.max_turn_tokens", "8"]


@pytest.fixture
def talk(converse):
    return converse(*ENVIRONMENT)


def observe(worker, grant, start, count, **fields):
    ids, _ = chunk_arrays(start, count)
    worker.report([observation(grant.lease_id, start, ids, **fields)])


def sample_of(talk, grant):
    return talk.ledger.groups[grant.group].samples[grant.index]


def test_an_observation_is_stored_but_counted_as_no_sampled_token(talk, worker):
    grant = finish_evaluation(worker)[0]
    before = talk.ledger.account.tokens["generated"]
    worker.chunk(grant, 0, 3)
    observe(worker, grant, 3, 2, state=b"one")
    worker.chunk(grant, 5, 4)
    sample = sample_of(talk, grant)
    assert (sample.length, sample.sampled_tokens, sample.observations) == (9, 7, [(3, 5)])
    assert sample.segments == [(0, 3, Version(0, 0)), (5, 9, Version(0, 0))]
    assert talk.ledger.account.tokens["generated"] == before + 7 and talk.ledger.account.closed
    assert worker.answers("acks")[-1] == (grant.lease_id, 9)
    assert talk.service.recorder.environment == {"observations": 1, "tokens": 2, "failed": 0}


@pytest.mark.parametrize("version", ["incarnation", "step"])
def test_an_observation_has_no_version(talk, worker, version):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    row, payload = observation(grant.lease_id, 3, chunk_arrays(3, 2)[0])
    worker.report([(row._replace(**{version: 1}), payload)])
    assert worker.answers("rejects") == [(grant.lease_id, "bad row: an observation has no version")]
    assert sample_of(talk, grant).observations == []


@pytest.mark.parametrize(
    ("chunks", "start", "count", "finish_reason"),
    [([], 0, 2, ""), ([(0, 3), "observation"], 5, 2, ""), ([(0, 20)], 20, 4, ""), ([(0, 20)], 20, 5, "length")],
    ids=["before any turn", "behind another", "the budget's end without a reason", "beyond the budget"],
)
def test_an_observation_without_a_turn_or_beyond_the_budget_is_invalid(
    talk, worker, chunks, start, count, finish_reason
):
    grant = finish_evaluation(worker)[0]
    for chunk in chunks:
        if chunk == "observation":
            observe(worker, grant, 3, 2)
        else:
            worker.chunk(grant, *chunk)
    observe(worker, grant, start, count, finish_reason=finish_reason)
    assert "invalid" in worker.answers("rejects")[-1][1]
    assert grant.lease_id not in talk.ledger.leases and talk.ledger.account.closed


def test_a_run_without_an_environment_refuses_observations(converse):
    talk = converse()
    worker = joined(FakeWorker(talk))
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    observe(worker, grant, 3, 2)
    assert "no environment" in worker.answers("rejects")[-1][1]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("behind", [0, 4], ids=["between turns", "in a turn"])
def test_a_resumed_grant_has_the_turn_and_the_state(talk, worker, restarted, behind):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    observe(worker, grant, 3, 2, state=b"one")
    worker.chunk(grant, 5, 1)
    observe(worker, grant, 6, 1, state=b"two")
    if behind:
        worker.chunk(grant, 7, behind)
    if restarted:
        talk.restart_broker()
        talk.tick(11.0)
    successor = joined(FakeWorker(talk, "w0", uid="another-process"))
    again = next(g for g in successor.grants() if (g.group, g.index) == (grant.group, grant.index))
    assert (again.turns, again.turn_start, again.state) == (2, 7, b"two")
    assert np.concatenate(again.arrays[1:]).tolist() == chunk_arrays(0, 7 + behind)[0].tolist()
    assert again.max_new_tokens == 24 - 7 - behind


def test_an_observation_may_end_the_response_and_its_state_goes_to_the_scorer(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    observe(worker, grant, 3, 2, state=b"end", finish_reason="stop")
    successor = joined(FakeWorker(talk, "w0", uid="another-process"))
    again = next(g for g in successor.grants() if (g.group, g.index) == (grant.group, grant.index))
    assert again.scoring and again.finish_reason == "stop" and again.state == b"end"
    successor.report(closings=[wire.Scored(again.lease_id, [1.0], [{}])])
    assert successor.answers("done") == [again.lease_id]


def test_a_reward_of_a_group_gets_the_state_of_each_response(converse):
    group = ["--evaluation.prompts", "1", "--reward.where", "scorer", "--reward.name", "group:my_rewards:rank"]
    talk = converse(*ENVIRONMENT, *group)
    worker, scorer = FakeWorker(talk), FakeScorer(talk)
    for peer in (worker, scorer):
        peer.join()
    grants = training(worker.grants())
    first, second = [grant for grant in grants if grant.group == grants[0].group]
    worker.chunk(first, 0, 3)
    observe(worker, first, 3, 2, state=b"end", finish_reason="stop")
    worker.chunk(second, 0, 4, "stop")
    (grant,) = scorer.grants()
    assert msgspec.msgpack.decode(grant.state) == [b"end", b""] and grant.group_scored == ["stop", "stop"]


def test_the_learner_gets_observations_outside_the_segments(talk, worker):
    learner = joined(FakeLearner(talk))
    grants = finish_evaluation(worker)
    while talk.ledger.steps.next == 0:
        grant = grants.pop(0)
        worker.chunk(grant, 0, 3)
        observe(worker, grant, 3, 2)
        worker.chunk(grant, 5, 2, "stop")
        worker.report(closings=[wire.Scored(grant.lease_id, [1.0], [{}])])
        grants += [grant for grant in worker.grants() if not grant.evaluation]
    batch, arrays = learner.fetch(0)
    head = batch.groups[0].samples[0]
    assert (head.response_tokens, head.segments) == (7, [(0, 3, Version(0, 0)), (5, 7, Version(0, 0))])
    assert arrays[1] == chunk_arrays(0, 7)[0].tolist()
    assert arrays[2] == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 2
    learner.consume(0)
    step = talk.service.recorder.steps[0]
    assert step["tokens"] == 8 * 5 and step["staleness"]["tokens_by_age"] == {"0": 40}
    assert step["lengths"]["trained"]["mean"] == 5
    assert step["environment"]["failed"] == 0 and step["environment"]["tokens"] >= 16


def test_a_failed_environment_is_a_failed_attempt_and_counted(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    worker.report(closings=[wire.GiveBack(grant.lease_id, 3, "environment_failed", "no answer within 5 s")])
    sample = sample_of(talk, grant)
    assert (sample.attempts, sample.last_error, sample.length) == (1, "no answer within 5 s", 3)
    assert talk.service.recorder.environment["failed"] == 1
