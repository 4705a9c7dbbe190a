"""The estimators of pass@k and mean@k agree with brute force; their confidence intervals agree with published values
and have the intended coverage."""

import gc
import weakref
from itertools import combinations

import numpy as np
import pytest

from april import config as configuration
from april import wire
from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.recovery import last_step
from april.broker.telemetry.evaluation import describe, pass_at, sizes, summarise, wilson
from april.config.stored import is_step
from april.observe.report.run_folder import read_records, records_from
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
    assert (result["accuracy"], result["prompts"], result["failed"]) == (pytest.approx(1 / 6, abs=1e-6), 2, 0)
    assert {k: v["value"] for k, v in result["pass_at_k"].items()} == {
        "1": pytest.approx(1 / 6, abs=1e-6),
        "2": pytest.approx(1 / 3, abs=1e-6),
        "3": 0.5,
    }


def test_a_result_names_every_version_that_its_samples_were_drawn_under(converse):
    talk = converse("--evaluation.prompts", "2")
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=16)
    grants = worker.grants()
    early, late = [grant for grant in grants if grant.evaluation]
    worker.complete(early)
    worker.chunk(late, 0, 2)
    others = training(grants)
    while not talk.ledger.steps.next:
        worker.complete(others.pop(0))
        others += training(worker.grants())
    assert learner.fetch(0) and not talk.ledger.evaluated
    learner.consume(0)
    worker.hold(1)
    worker.chunk(late, 2, 2, "stop")
    worker.report(closings=[wire.Scored(late.lease_id, [1.0], [{}])])
    result = talk.ledger.evaluated[0]
    assert (result["version"], result["versions"]) == ([0, 1], [[0, 0], [0, 1]])
    talk.restart_broker()
    assert talk.ledger.evaluated[0] == result


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


def test_several_greedy_samples_are_refused(config_file):
    with pytest.raises(configuration.ConfigError, match=r"evaluation.samples"):
        configuration.load(config_file, ["--evaluation.samples", "4", "--evaluation.temperature", "0"])


def test_every_sample_of_a_prompt_is_handed_out_though_a_newer_policy_has_taken_the_first():
    ledger = Ledger(Rules(batch_groups=1, group_size=2, max_staleness=1))
    ledger.start_learner(0)
    group = ledger.open_group(0, 0, floor=0, evaluation=True, size=2)
    first = ledger.queue.take_evaluation(step=3)
    ledger.lease(first, "w0", 3, expires_at=1.0)
    assert ledger.queue.take_evaluation(step=3) is group.samples[1]
