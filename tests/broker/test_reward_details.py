"""Components of rewards: on the wire, in the ledger, in the metrics of a step, and in an evaluation's accuracy."""

from april.broker.ledger.samples import Sample
from april.observe.report.run_folder import read_records
from tests.support.broker_conversation import finish_evaluation, training


def score(worker, grant, reward, **details):
    worker.chunk(grant, 0, 4, "stop")
    worker.score(grant, reward, **details)


def test_reward_details_are_recorded_with_the_step_and_survive_a_restart(talk, worker, learner):
    grants = finish_evaluation(worker)
    score(worker, grants[0], 0.75, base=1.0, overlong=-0.25)
    talk.restart_broker()
    assert talk.ledger.groups[grants[0].group].samples[grants[0].index].details == {"base": 1.0, "overlong": -0.25}


def test_means_of_details_are_in_the_line_of_their_step(talk, worker, learner):
    grants, ledger = finish_evaluation(worker), talk.ledger
    while ledger.steps.next == 0:
        grant = grants.pop(0)
        score(worker, grant, 1.0, base=float(grant.index))
        grants += training(worker.grants())
    learner.fetch(0)
    learner.consume(0)
    line = read_records(talk.config.run_dir / "metrics.jsonl")[0]
    assert line["reward"] == 1.0 and line["reward_details"] == {"base": 0.5}


def test_accuracy_is_what_was_correct_and_not_what_penalties_leave(talk, worker):
    [grant] = [grant for grant in worker.grants() if grant.evaluation]
    score(worker, grant, -0.5, base=1.0, overlong=-1.5)
    assert talk.ledger.evaluated[0]["accuracy"] == 1.0
    assert [accuracy_of(-1.0, correct=0.0), accuracy_of(0.25)] == [0.0, 0.25]


def accuracy_of(reward, **details):
    return Sample(None, 0, reward=reward, details=details or None).accuracy


def test_too_many_details_or_details_that_are_no_numbers_are_refused(talk, worker):
    grant = training(worker.grants())[0]
    worker.chunk(grant, 0, 4, "stop")
    for details in ({f"d{n}": 0.0 for n in range(17)}, {"d": float("nan")}):
        worker.score(grant, 1.0, **details)
        assert "details" in worker.answers("rejects")[-1][1]
    assert talk.ledger.leases[grant.lease_id].sample.reward is None


def test_a_reward_that_is_not_finite_or_too_large_is_refused(talk, worker):
    grant = training(worker.grants())[0]
    worker.chunk(grant, 0, 4, "stop")
    for reward, details in ((1.7e308, {}), (float("inf"), {}), (float("nan"), {}), (1.0, {"d": -1.7e308})):
        worker.score(grant, reward, **details)
        assert "finite" in worker.answers("rejects")[-1][1]
    assert talk.ledger.leases[grant.lease_id].sample.reward is None
