"""Responses that workers have generated are leased to scorers: only complete ones, and only for their scores."""

import pytest

from april import wire
from april.broker.ledger.samples import SampleState
from tests.support.broker_conversation import FakeLearner, FakeScorer, FakeWorker, chunk_arrays, joined, training


@pytest.fixture
def talk(converse):
    return converse("--evaluation.prompts", "1", "--reward.where", "scorer")


@pytest.fixture
def scorer(talk):
    return joined(FakeScorer(talk))


def sample_of(talk, grant):
    return talk.ledger.groups[grant.group].samples[grant.index]


def test_the_lease_of_a_worker_ends_with_the_response_and_a_scorer_gets_another(talk, worker, scorer):
    grant = training(worker.grants())[0]
    assert grant.hand_over and not grant.scoring
    worker.chunk(grant, 0, 4, "stop")
    assert worker.take(wire.Answers)[-1].message == wire.Answers([(grant.lease_id, 4)], [grant.lease_id])
    (given,) = scorer.grants()
    assert given.scoring and not given.hand_over and given.lease_id > grant.lease_id
    assert (given.group, given.index, given.label, given.finish_reason) == (
        grant.group, grant.index, grant.label, "stop",
    )  # fmt: skip
    assert given.arrays[1].tolist() == chunk_arrays(0, 4)[0].tolist()
    scorer.score(given, 0.25, right=0.25)
    assert scorer.answers("done") == [given.lease_id]
    sample = sample_of(talk, grant)
    assert (sample.state, sample.reward, sample.details) == (SampleState.DONE, 0.25, {"right": 0.25})


def test_workers_get_nothing_to_score_and_scorers_nothing_to_generate(talk, worker):
    scorer = joined(FakeScorer(talk))
    assert scorer.grants() == []
    scorer.say(wire.Goodbye())
    worker.chunk(training(worker.grants())[0], 0, 4, "stop")
    talk.tick(1.0)
    assert not any(grant.scoring for grant in worker.grants())


def test_a_lost_scorer_s_responses_are_scored_by_another_with_all_their_tokens(talk, worker, scorer):
    grant = training(worker.grants())[0]
    worker.chunk(grant, 0, 4, "stop")
    (first,) = scorer.grants()
    other = joined(FakeScorer(talk, "s1"))
    talk.service.end_session(talk.service.peers.holder(scorer.uid), "cut off", talk.now)
    talk.tick()
    (second,) = other.grants()
    assert (second.group, second.index, second.scoring) == (grant.group, grant.index, True)
    assert "scorer s0 was lost" in sample_of(talk, grant).last_error
    scorer.hello([first.lease_id])
    scorer.report(closings=[wire.Scored(first.lease_id, [1.0], [{}])])
    assert scorer.answers("rejects")[0][1] == "the lease is not current"
    other.report(closings=[wire.Scored(second.lease_id, [0.5], [{}])])
    assert sample_of(talk, grant).reward == 0.5


def test_the_least_loaded_scorer_gets_the_next_response_up_to_its_capacity(talk, worker):
    small, large = joined(FakeScorer(talk, "s0"), capacity=1), joined(FakeScorer(talk, "s1"), capacity=4)
    for grant in training(worker.grants())[:6]:
        worker.chunk(grant, 0, 2, "stop")
    assert len(small.grants()) == 1 and len(large.grants()) == 4
    found = talk.status()
    assert [(one["name"], one["leased"], one["capacity"]) for one in found["scorers"]] == [("s0", 1, 1), ("s1", 4, 4)]


def test_the_end_of_the_run_stops_scorers_and_the_broker_waits_for_them(talk, worker, scorer):
    learner = joined(FakeLearner(talk))
    talk.service.stop("seen enough", "stopped", talk.now)
    talk.deliver()
    assert scorer.take(wire.Stop)
    for peer in (worker, learner):
        peer.say(wire.Goodbye())
    assert not talk.service.everyone_left()
    scorer.say(wire.Goodbye())
    assert talk.service.everyone_left()


def test_a_broker_whose_workers_score_gives_scorers_nothing(converse):
    talk = converse()
    scorer, worker = joined(FakeScorer(talk)), joined(FakeWorker(talk))
    grant, other = training(worker.grants())[:2]
    worker.chunk(grant, 0, 4, "stop")
    worker.report(closings=[wire.GiveBack(grant.lease_id, 4, "scoring_failed", "no such unit")])
    worker.complete(other)
    assert [one.scoring for one in worker.grants() if (one.group, one.index) == (grant.group, grant.index)] == [True]
    assert scorer.grants() == []


# --- groups that are scored together --------------------------------------------------------------------------------


def together(converse, where):
    overrides = ["--evaluation.prompts", "1", "--reward.where", where, "--reward.name", "group:my_rewards:rank"]
    return converse(*overrides)


def group_of(grants):
    """Training grants that belong to the same group as the first one."""
    training_grants = training(grants)
    return [grant for grant in training_grants if grant.group == training_grants[0].group]


def test_a_group_waits_until_it_is_whole_and_goes_to_one_scorer_as_one_lease(converse):
    talk = together(converse, "scorer")
    worker, scorers = FakeWorker(talk), [FakeScorer(talk, "s0"), FakeScorer(talk, "s1")]
    for peer in (worker, *scorers):
        peer.join()
    first, second = group_of(worker.grants())
    worker.chunk(first, 0, 4, "stop")
    assert [scorer.grants() for scorer in scorers] == [[], []]
    worker.chunk(second, 0, 2)
    worker.chunk(second, 2, 3, "length")
    (grant,) = [grant for scorer in scorers for grant in scorer.grants()]
    assert (grant.group, grant.scoring, grant.group_scored) == (first.group, True, ["stop", "length"])
    assert [array.tolist() for array in grant.arrays[1:]] == [chunk_arrays(0, n)[0].tolist() for n in (4, 5)]
    scorer = next(one for one in scorers if talk.ledger.leases.held.get(one.uid))
    for rewards, details in (([1.0], [{}]), ([1.0, 1.0], [{}]), ([1.0] * 3, [{}] * 3)):
        scorer.report(closings=[wire.Scored(grant.lease_id, rewards, details)])
        assert "for each response" in scorer.answers("rejects")[0][1]
    scorer.report(closings=[wire.Scored(grant.lease_id, [0.0, 1.0], [{"place": 1.0}, {"place": 0.0}])])
    assert scorer.answers("done") == [grant.lease_id]
    samples = talk.ledger.groups[grant.group].samples
    assert [(sample.reward, sample.details) for sample in samples] == [(0.0, {"place": 1.0}), (1.0, {"place": 0.0})]


def test_without_scorers_a_worker_scores_the_group(converse):
    talk = together(converse, "worker")
    worker = joined(FakeWorker(talk))
    first, second = group_of(worker.grants())
    assert first.hand_over
    for grant in (first, second):
        worker.chunk(grant, 0, 3, "stop")
    (grant,) = [grant for grant in worker.grants() if grant.scoring]
    assert grant.group_scored == ["stop", "stop"] and not grant.hand_over
    talk.restart_broker()
    worker = FakeWorker(talk)
    assert worker.join(leases=[grant.lease_id]).lost_lease_ids == []
    worker.report(closings=[wire.GiveBack(grant.lease_id, 6, "scoring_failed", "no such judge")])
    worker.chunk(training(worker.grants())[0], 0, 3, "stop")
    (again,) = [one for one in worker.grants() if one.scoring]
    assert (again.group, again.group_scored) == (grant.group, ["stop", "stop"])
    worker.report(closings=[wire.Scored(again.lease_id, [0.0, 1.0], [{}, {}])])
    assert [sample.attempts for sample in talk.ledger.groups[grant.group].samples] == [1, 1]
    assert talk.ledger.groups[grant.group].state == "ready"


def test_a_group_that_cannot_be_scored_is_a_dead_letter(converse):
    talk = together(converse, "scorer")
    worker, scorer = FakeWorker(talk), FakeScorer(talk)
    for peer in (worker, scorer):
        peer.join()
    group = group_of(worker.grants())
    for grant in group:
        worker.chunk(grant, 0, 3, "stop")
    for _ in range(talk.config.broker.attempts):
        (grant,) = scorer.grants()
        scorer.report(closings=[wire.GiveBack(grant.lease_id, 0, "scoring_failed", "no such judge")])
        talk.tick()
    assert scorer.grants() == []
    (letter,) = talk.ledger.dead_letters.letters
    assert (letter.group, letter.error, letter.outcome) == (group[0].group, "no such judge", "discarded")
    assert talk.ledger.account.discarded == {"dead_sample": 6} and talk.ledger.account.closed
