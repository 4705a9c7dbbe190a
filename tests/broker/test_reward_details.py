"""Components of rewards: on the wire, in the ledger, in the metrics of a step, and in an evaluation's accuracy."""

import orjson
import pytest

from april.broker.ledger.samples import Sample
from april.broker.telemetry.evaluation import describe_evaluation
from april.observe.report.facts import facts
from april.observe.report.run_folder import RunFolder, read_records
from tests.support.broker_conversation import FakeWorker, finish_evaluation, joined, training


def score(worker, grant, reward, **details):
    worker.chunk(grant, 0, 4, "stop")
    worker.score(grant, reward, **details)


def test_means_of_details_and_the_share_that_was_truncated_are_in_the_line_of_their_step(talk, worker, learner):
    grants, ledger = finish_evaluation(worker), talk.ledger
    while ledger.steps.next == 0:
        grant = grants.pop(0)
        worker.chunk(grant, 0, 4, "length" if grant.index else "stop")
        worker.score(grant, 1.0, base=float(grant.index))
        grants += training(worker.grants())
    learner.fetch(0)
    learner.consume(0)
    line = read_records(talk.config.run_dir / "metrics.jsonl")[0]
    assert line["reward"] == 1.0 and line["reward_details"] == {"base": 0.5}
    assert line["lengths"]["truncated_share"] == 0.5


def test_accuracy_is_what_was_correct_and_not_what_penalties_leave(talk, worker):
    [grant] = [grant for grant in worker.grants() if grant.evaluation]
    score(worker, grant, -0.5, base=1.0, overlong=-1.5)
    result = talk.ledger.evaluated[0]
    assert (result["accuracy"], result["reward"]) == (None, 1.0), "nobody has said what was correct"
    assert [accuracy_of(-1.0, correct=0.0), accuracy_of(0.25)] == [0.0, 0.25]


@pytest.mark.parametrize(
    "last, said", [({"correct": 0.0}, "accuracy 0.500"), ({"over_limit": 1.0}, "accuracy 0.500"), ({}, "reward 0.350")]
)
def test_an_evaluation_says_accuracy_only_if_it_is_known_of_each_sample_what_was_correct(converse, last, said):
    talk = converse("--evaluation.prompts", "2")
    worker = joined(FakeWorker(talk), capacity=16)
    first, second = [grant for grant in worker.grants() if grant.evaluation]
    worker.complete(first, reward=0.7, correct=1.0)
    worker.complete(second, reward=0.0, **last)
    assert said in describe_evaluation(talk.ledger.evaluated[0])
    assert any(fact.startswith(said) for fact in said_by(talk))


def said_by(talk):
    talk.service._write_summary(talk.now)
    run = RunFolder(talk.config.run_dir, "", {}, [], orjson.loads((talk.config.run_dir / "summary.json").read_bytes()))
    return [f"{name.split(',')[0].removeprefix('held-out ')} {value}" for name, value in facts(run)]


def accuracy_of(reward, **details):
    return Sample(None, 0, reward=reward, details=details or None).accuracy


def test_a_reward_that_is_not_finite_or_too_large_is_refused(talk, worker):
    grant = training(worker.grants())[0]
    worker.chunk(grant, 0, 4, "stop")
    for reward, details in ((1.7e308, {}), (float("inf"), {}), (float("nan"), {}), (1.0, {"d": -1.7e308})):
        worker.score(grant, reward, **details)
        assert "finite" in worker.answers("rejects")[-1][1]
    assert talk.ledger.leases[grant.lease_id].sample.reward is None
