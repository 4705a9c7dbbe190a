"""The estimators of pass@k and mean@k agree with brute force; their confidence intervals agree with published values
and have the intended coverage."""

import gc
import weakref
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from april import wire
from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.ledger import Ledger
from april.broker.recovery import last_step
from april.broker.telemetry.evaluation import describe, describe_evaluation, pass_at, sizes, summarise, wilson
from april.config.stored import is_step
from april.observe.report.run_folder import read_records, records_from
from april.wire.message import Version
from tests.support.broker_conversation import FakeLearner, FakeWorker, finish_evaluation, joined, train, training


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples):
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_s_interval_has_its_textbook_values():
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    solved = rng.beta(1, 1, (2000, 100))  # a prompt's own chance of success; their mean is 0.5
    rewards = rng.binomial(4, solved) / 4
    found = [describe(list(row)) for row in rewards]
    assert np.mean([one["low"] <= 0.5 <= one["high"] for one in found]) >= 0.95


def test_rewards_outside_0_and_1_have_a_normal_interval():
    found = describe([-1.0, 2.0, 5.0])
    assert found["value"] == 2.0 and found["low"] < -1 and found["high"] > 5


def test_prompts_that_lack_samples_count_where_they_have_enough():
    found = summarise([[1.0, 0.0, 0.0, 0.0], [1.0]], samples=4)
    assert found["mean_at_k"]["k"] == 4 and found["mean_at_k"]["value"] == (0.25 + 1) / 2
    assert {k: (v["value"], v["prompts"]) for k, v in found["pass_at_k"].items()} == {
        "1": ((0.25 + 1) / 2, 2), "2": (0.5, 1), "4": (1.0, 1)
    }  # fmt: skip
    assert summarise([], samples=1) == {"mean_at_k": None, "pass_at_k": {"1": None}}
    assert (sizes(1), sizes(6), sizes(8)) == ([1], [1, 2, 4, 6], [1, 2, 4, 8])


def test_several_samples_of_a_held_out_prompt_are_evaluated_beside_training(converse):
    overrides = ["--evaluation.prompts", "2", "--evaluation.samples", "3"]
    talk = converse(*overrides)
    worker = joined(FakeWorker(talk), capacity=16)
    grants = [grant for grant in worker.grants() if grant.evaluation]
    assert len(grants) == 6 and len({grant.seed for grant in grants}) == 6
    for turn, grant in enumerate(sorted(grants, key=lambda grant: (grant.group, grant.index))):
        worker.complete(grant, reward=float(turn == 0))
    result = talk.ledger.evaluated[0]
    assert (result["reward"], result["prompts"], result["failed"]) == (pytest.approx(1 / 6, abs=1e-6), 2, 0)
    assert result["accuracy"] is None and "step 0: reward 0.167 on" in describe_evaluation(result)
    assert {k: v["value"] for k, v in result["pass_at_k"].items()} == {
        "1": pytest.approx(1 / 6, abs=1e-6),
        "2": pytest.approx(1 / 3, abs=1e-6),
        "3": 0.5,
    }


HELD_OUT = ["--evaluation.prompts", "3", "--evaluation.every", "1", "--evaluation.hold_s", "30"]


@pytest.fixture
def overtaken(converse):
    """overtaken(*overrides) -> (conversation, learner, worker, three held-out grants of the evaluation of step 0), when
    the learner has weights 1; one held-out sample is complete, the other two have two tokens each."""

    def run(*overrides):
        talk = converse(*HELD_OUT, *overrides)
        learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=16)
        grants = worker.grants()
        held_out = [grant for grant in grants if grant.evaluation]
        worker.complete(held_out[0])
        for grant in held_out[1:]:
            worker.chunk(grant, 0, 2)
        others = training(grants)
        while not talk.ledger.steps.next:
            worker.complete(others.pop(0))
            others += training(worker.grants())
        for lease in [lease for lease in talk.ledger.leases.values() if not lease.sample.group.evaluation]:
            worker.give_back(lease_of(lease), lease.sample.length, "abort")
        assert learner.fetch(0) and not talk.ledger.evaluated
        learner.consume(0)
        return talk, learner, worker, held_out

    return run


def steps_of(grants, talk):
    return {talk.ledger.groups[grant.group].opened_at for grant in grants if grant.evaluation}


def test_an_evaluation_ends_on_its_version_though_the_learner_has_newer_weights(overtaken):
    talk, _, worker, held_out = overtaken()
    newer = joined(FakeWorker(talk, "w1"), 1, capacity=16)
    assert steps_of(newer.grants(), talk) == {1}
    for grant in held_out[1:]:
        worker.chunk(grant, 2, 2, "stop")
        worker.score(grant)
    result = talk.ledger.evaluated[0]
    assert (result["version"], result["versions"]) == ([0, 0], [[0, 0]])
    assert (result["prompts"], result["not_evaluated"], result["failed"]) == (3, 0, 0)
    talk.restart_broker()
    assert talk.ledger.evaluated[0] == result


def test_what_a_newer_version_has_sampled_does_not_count(overtaken):
    talk, _, worker, held_out = overtaken()
    worker.hold(1)
    worker.chunk(held_out[1], 2, 2, "stop")
    assert "fenced" in worker.answers("rejects")[-1][1]
    worker.give_back(held_out[2], 2, "recall")
    assert steps_of(worker.grants(), talk) == {1}, "the rest of the evaluation is for workers with its version"
    talk.tick(0.3)
    result = talk.ledger.evaluated[0]
    assert (result["versions"], result["prompts"], result["not_evaluated"]) == ([[0, 0]], 1, 2)
    assert "1 prompts, 2 not evaluated in time" in describe_evaluation(result)


def test_another_worker_with_the_evaluated_version_goes_on_with_what_is_left(overtaken):
    talk, _, worker, held_out = overtaken()
    second = joined(FakeWorker(talk, "w1"), 0, capacity=16)
    worker.hold(1)
    for grant in held_out[1:]:
        worker.give_back(grant, 2, "recall")
    talk.tick(0.3)
    taken = [grant for grant in second.grants() if grant.evaluation]
    assert steps_of(taken, talk) == {0} and len(taken) == 2
    for grant in taken:
        second.chunk(grant, 2, 2, "stop")
        second.score(grant)
    result = talk.ledger.evaluated[0]
    assert (result["versions"], result["prompts"], result["not_evaluated"]) == ([[0, 0]], 3, 0)


def test_an_evaluation_that_outlasts_hold_s_is_ended_and_its_free_slots_are_counted(overtaken):
    talk, _, worker, _ = overtaken("--worker.prefetch", "0")
    worker.take(wire.Cancel)
    for _ in range(100):
        talk.tick(0.25)
        worker.say(wire.Heartbeat(list(talk.ledger.leases), 0))
    assert 0 not in talk.ledger.evaluated
    for _ in range(24):
        talk.tick(0.25)
    result = talk.ledger.evaluated[0]
    assert (result["versions"], result["prompts"], result["not_evaluated"]) == ([[0, 0]], 1, 2)
    assert result["held_slot_s"] == pytest.approx(30 * (16 - 2), rel=0.02)
    assert worker.take(wire.Cancel), "the worker drops what was not evaluated"


def test_workers_are_told_when_held_out_samples_wait_for_them(converse):
    talk = converse(*HELD_OUT)
    joined(FakeLearner(talk))
    worker = joined(FakeWorker(talk), capacity=2)
    told = [received.message.steps for received in worker.take(wire.Evaluating)]
    assert told[-1] == [0], "two of three are granted"
    late = FakeWorker(talk, "w1")
    late.hello()
    assert [received.message.steps for received in late.take(wire.Evaluating)] == [[0]]
    late.hold(0, capacity=8)
    assert [received.message.steps for received in worker.take(wire.Evaluating)] == [[]]
    talk.restart_broker()
    again = joined(FakeWorker(talk), 0, capacity=2)
    assert next(received.message.steps for received in again.take(wire.Evaluating)) == [0], "its leases are lost"


def test_an_evaluation_begins_again_once_a_restarted_learner_has_replaced_its_version(converse):
    talk = converse(*HELD_OUT, "--schedule.max_steps", "1")
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=16)
    train(talk, worker, learner, 0)
    learner.durable(1)
    held_out = [grant for grant in worker.grants() if grant.evaluation]
    assert steps_of(held_out, talk) == {1}
    worker.complete(held_out[0])
    learner = joined(FakeLearner(talk), 1)
    talk.tick(0.3)
    assert len(talk.ledger.evaluations[1]) == 3 and talk.ledger.evaluated_versions == {1: (0, 1)}
    worker.say(wire.Goodbye())
    worker = FakeWorker(talk, "w1")
    worker.hello()
    worker.version = Version(1, 1)
    worker.say(wire.WorkerCapacity(worker.version, 16))
    assert not worker.grants(), "what has begun under 0.1 does not go on under 1.1"
    talk.tick(0.3)
    held_out = [grant for grant in worker.grants() if grant.evaluation]
    assert len(held_out) == 3
    for grant in held_out:
        worker.complete(grant)
    result = talk.ledger.evaluated[1]
    assert (result["version"], result["versions"], result["prompts"]) == ([1, 1], [[1, 1]], 3)
    talk.restart_broker()
    assert talk.ledger.evaluated[1] == result


def test_an_evaluation_of_which_prompts_were_left_out_is_not_the_best(converse):
    talk = converse(*HELD_OUT, "--evaluation.best", "heldout")
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=16)
    for step, (evaluated, reward) in enumerate([(3, 1.0), (3, 0.5), (1, 1.0)]):
        held_out = [grant for grant in worker.grants() if grant.evaluation]
        for grant in held_out[:evaluated]:
            worker.complete(grant, reward=reward)
        train_beside(talk, worker, learner, step)
        worker.hold(step + 1)
        for grant in held_out[evaluated:]:
            worker.give_back(grant, 0, "recall")
        talk.tick(0.3)
    results = [(result["reward"], result["not_evaluated"]) for result in talk.ledger.evaluated.values()]
    assert results == [(1.0, 0), (0.5, 0), (1.0, 2)] and talk.service.evaluations.best() == 1


def train_beside(talk, worker, learner, step):
    """Generate and train a batch while an evaluation goes on."""
    while talk.ledger.steps.next == step:
        for lease in list(talk.ledger.leases.values()):
            if lease.generating and not lease.sample.group.evaluation:
                worker.complete(lease_of(lease))
    for lease in [lease for lease in talk.ledger.leases.values() if not lease.sample.group.evaluation]:
        worker.give_back(lease_of(lease), lease.sample.length, "abort")
    learner.fetch(step)
    learner.consume(step)


def lease_of(lease):
    return SimpleNamespace(lease_id=lease.id, evaluation=lease.sample.group.evaluation)


def test_an_evaluation_has_its_line_behind_its_sync_and_once(converse):
    overrides = ["--evaluation.prompts", "2", "--evaluation.every", "1", "--schedule.max_steps", "8"]
    talk = converse(*overrides)
    path, worker, learner = talk.config.run_dir / "metrics.jsonl", FakeWorker(talk), FakeLearner(talk)
    learner.join()
    worker.join(capacity=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk.service.recorder.metrics_file, "release", lambda size: None)
        finish_evaluation(worker)
        assert 0 in talk.ledger.evaluated and not path.exists(), "killed before it is written"
    talk.restart_broker()
    talk.service.recorder.metrics_file.write()
    assert evaluations(path) == [talk.ledger.evaluated[0]]
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=16)
    for step in range(6):
        train(talk, worker, learner, step)
        learner.durable(step + 1)
    finish_evaluation(worker)
    found = list(talk.ledger.evaluated.values())
    assert evaluations(path) == found and len(found) == 7
    assert [line["step"] for line in read_records(path)] == [1, 2, 3, 4, 5, 6] and last_step(path) == 6
    assert talk.service.recorder.metrics_file.summary.evaluated, "those that a start does not read again"
    for kept in (path.with_name("metrics.past"), None):
        talk.restart_broker()
        talk.service.recorder.metrics_file.write()
        assert evaluations(path) == found
        if kept:
            kept.unlink()


def evaluations(path):
    """Evaluations in metrics.jsonl, in the form in which summary.json lists them."""
    lines = [line for line, _, _ in records_from(path) if not is_step(line)]
    return [{"step": line["step"], "time": line["time"]} | line["evaluation"] for line in lines]


def test_of_a_recorded_evaluation_only_the_result_is_kept(converse):
    talk = converse("--evaluation.prompts", "2")
    worker = joined(FakeWorker(talk), capacity=16)
    groups = [weakref.ref(group) for group in talk.ledger.evaluations[0]]
    gc.disable()
    try:
        finish_evaluation(worker)
        assert [group() for group in groups] == [None, None]
    finally:
        gc.enable()
    result = talk.ledger.evaluated[0]
    again = Ledger(talk.ledger.rules)
    thaw(freeze(talk.ledger), again)
    assert again.evaluated == {0: result} and not any(group.evaluation for group in again.groups.values())
    talk.restart_broker()
    talk.tick()
    assert talk.ledger.evaluated == {0: result} and not talk.ledger.evaluations
