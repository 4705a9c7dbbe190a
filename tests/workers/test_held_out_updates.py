"""A worker puts newer weights off while held-out samples of its version are generated, and no longer."""

from types import SimpleNamespace

import pytest

from april import wire
from april.weights.source import StagedWeights
from april.wire.message import Version
from april.workers.engines.weight_loading import WeightLoader
from tests.support.broker_conversation import FakeLearner, joined
from tests.support.published_weights import Receiver
from tests.support.worker_and_broker import BrokerAndWorker

NEWER = Version(0, 1)


@pytest.fixture
def overtaken(config_file, monkeypatch):
    """overtaken(*overrides) -> (broker and worker, the worker's receiver), when weights 1 have arrived while the first
    evaluation goes on: of its 8 samples the worker, which has 4 slots, generates one at a time."""

    def start(*overrides):
        slow = ["--evaluation.share", "0.25", "--worker.prefetch", "0"]
        run = BrokerAndWorker(config_file, monkeypatch, [*slow, *overrides])
        learner, receiver = joined(FakeLearner(run.talk)), Receiver()
        run.start_worker(capacity=4)
        run.worker.weight_loaders = [WeightLoader(run.worker.engine, receiver)]
        run.until(lambda: run.ledger.steps.next == 1)
        assert learner.fetch(0)
        learner.consume(0)
        assert not run.ledger.evaluated
        receiver.staged = [StagedWeights(NEWER, run.weights, 0.0)]
        return run, receiver

    return start


def test_newer_weights_wait_for_the_end_of_the_evaluation(overtaken):
    run, receiver = overtaken()
    run.run_pass()
    assert receiver.reported[0] == "put off" and run.worker.engine.version == Version(0, 0)
    run.until(lambda: run.worker.engine.version == NEWER)
    run.until(lambda: run.ledger.evaluated)
    result = run.ledger.evaluated[0]
    assert (result["versions"], result["prompts"], result["not_evaluated"]) == ([[0, 0]], 8, 0)


def test_after_hold_s_the_worker_loads_newer_weights_and_what_is_left_is_not_evaluated(overtaken):
    run, receiver = overtaken("--evaluation.hold_s", "0")
    run.run_pass()
    assert not receiver.reported and run.worker.engine.version == NEWER
    assert not run.worker._held_out(), "they are given back"
    run.until(lambda: run.ledger.evaluated)
    result = run.ledger.evaluated[0]
    assert result["versions"] in ([], [[0, 0]]) and result["prompts"] + result["not_evaluated"] == 8
    assert result["not_evaluated"] > 0 and result["failed"] == 0
    assert not [lease for lease in run.ledger.leases.values() if lease.sample.attempts], "that is no failure"


def test_the_same_version_and_an_engine_without_weights_are_not_put_off(overtaken):
    run, receiver = overtaken()
    receiver.staged = [StagedWeights(Version(0, 0), run.weights, 0.0)]
    run.run_pass()
    assert not receiver.staged and not receiver.reported
    receiver.staged = [StagedWeights(NEWER, run.weights, 0.0)]
    run.worker.engine.discard_weights()
    run.run_pass()
    assert run.worker.engine.version == NEWER


def test_an_update_is_put_off_between_two_held_out_samples_as_long_as_the_broker_says_that_others_wait(overtaken):
    run, _ = overtaken()
    worker = run.worker
    worker.active.clear()
    worker._handle(wire.Received(wire.Evaluating([0]), []))
    worker._load_weights()
    assert worker.engine.version == Version(0, 0)
    worker._handle(wire.Received(wire.Evaluating([]), []))
    worker._load_weights()
    assert worker.engine.version == NEWER


def test_an_engine_that_takes_turns_with_the_learner_stays_until_no_held_out_sample_waits(overtaken):
    run, _ = overtaken()
    worker, delayed = run.worker, []
    worker.time_sharing = SimpleNamespace(
        keeps_device=False, holds_device=True, switch=lambda engine, loading, staged: delayed.append(loading)
    )
    for waiting in ([0], []):
        worker._handle(wire.Received(wire.Evaluating(waiting), []))
        worker._share_device()
        worker._report_capacity_change()
        assert (worker._reported_capacity is None) is (not waiting), "the learner waits, so nothing else is taken on"
    assert delayed == [True, False]
