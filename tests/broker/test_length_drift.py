"""The alarm against length bias: silent while everything is trained, loud when work is dropped."""

import numpy as np
import pytest

from april.broker.length_drift import RECENT_BATCHES, LengthDrift, measure_drift
from april.broker.lengths import LengthCohorts
from april.report.live import step_line
from april.simulate.pipeline import Pipeline
from tests.simulate.test_pipeline import SCHEDULES, scenario


def groups(rng, count, median=300.0):
    """Lengths of 8 responses each, groups far apart and siblings alike."""
    center = median * np.exp(0.6 * rng.standard_normal((count, 1)))
    return (center * np.exp(0.35 * rng.standard_normal((count, 8)))).astype(int).tolist()


def test_two_draws_of_the_same_lengths_are_within_the_band_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    alarms = sum(measure_drift(groups(rng, 60), groups(rng, 60)).alarm for _ in range(100))
    assert alarms <= 5


def test_shorter_ones_are_beyond_it():
    rng = np.random.default_rng(1)
    drift = measure_drift(groups(rng, 300, median=240), groups(rng, 300))
    assert drift.alarm and drift.to_json()["alarm"] is True


def test_the_distance_is_that_of_the_definition():
    drift = measure_drift([[1, 2], [2, 5]], [[2, 3], [6, 7]])
    assert drift.distance == pytest.approx(0.5), "at 2: three of four, and one of four"


def test_there_is_no_verdict_before_both_windows_are_full():
    drift = LengthDrift(batch_groups=1)
    for length in range(RECENT_BATCHES):
        assert drift.verdict() is None
        drift.trained.append([length])
        drift.created.append([length])
    assert drift.verdict().distance == 0


def alarms(name, seed):
    """Share of alarms, looked for after every fourth batch of a simulated run that has a verdict."""
    pipeline = Pipeline(scenario(seed=seed, steps=60, schedule__rollout_batch_size=8, **SCHEDULES[name] | {
        "schedule__over_sampling_batch_size": 16 if name in ("april", "dropped") else None,
    }))  # fmt: skip
    note, said = pipeline.measures.trained, []

    def look(step, batch):
        if step % 4 == 0 and (verdict := pipeline.ledger.cohorts.drift.verdict()):
            said.append(verdict.alarm)
        note(step, batch)

    pipeline.measures.trained = look
    pipeline.run()
    assert len(said) > 8
    return sum(said) / len(said)


@pytest.mark.parametrize("name", ["sync", "april", "continuous"])
def test_it_is_silent_when_everything_is_trained(name):
    assert [alarms(name, seed) for seed in range(5)] == [0.0] * 5


def test_it_fires_when_unfinished_work_is_dropped():
    assert min(alarms("dropped", seed) for seed in range(5)) > 0.8


def test_what_is_dropped_whatever_its_length_is_seen_in_the_counts():
    cohorts = LengthCohorts(2)
    cohorts.finish(0, [5, 7], trained=[5, 7])
    cohorts.finish(1, [5, 7], trained=[])
    found = cohorts.summary()
    assert (found["ratio"], found["created"]["responses"], found["trained"]["responses"]) == (1.0, 4, 2)


def test_the_live_view_says_so():
    record = {"step": 3, "lengths": {"drift": {"distance": 0.2, "band": 0.1, "alarm": True}}}
    assert "LENGTHS BIASED 0.200 > 0.100" in step_line(record, {})
    record["lengths"]["drift"]["alarm"] = False
    assert "BIASED" not in step_line(record, {})
