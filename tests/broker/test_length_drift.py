"""The alarm against length bias is silent while all groups are trained, and raised when long responses are dropped."""

import numpy as np
import pytest

from april.broker.ledger.batches import RECENT_BATCHES, LengthCohorts
from april.broker.telemetry.lengths import drift_of, measure_drift, summarise_cohorts
from april.observe.report.live import step_line
from april.simulate.pipeline import Pipeline
from tests.support.marks import full
from tests.support.simulated_scenarios import SCHEDULES, scenario


def groups(rng, count, median=300.0):
    """Response lengths of `count` groups of 8; groups differ much, responses within a group little."""
    center = median * np.exp(0.6 * rng.standard_normal((count, 1)))
    return (center * np.exp(0.35 * rng.standard_normal((count, 8)))).astype(int).tolist()


def test_two_draws_of_the_same_lengths_are_within_the_band_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    alarms = sum(measure_drift(groups(rng, 60), groups(rng, 60)).alarm for _ in range(100))
    assert alarms <= 5


def test_the_distance_is_that_of_the_definition():
    drift = measure_drift([[1, 2], [2, 5]], [[2, 3], [6, 7]])
    assert drift.distance == pytest.approx(0.5), "at 2: three of four, and one of four"


def test_a_cohort_counts_once_all_its_groups_have_ended():
    cohorts = LengthCohorts(cohort_groups=2)
    cohorts.finish(1, created=[5, 5], trained=[5, 5])
    assert cohorts.settled == 0 and not cohorts.created and not cohorts.trained
    cohorts.finish(0, created=[9, 7], trained=[])
    assert cohorts.settled == 1
    assert sorted(cohorts.created.elements()) == [5, 5, 7, 9] and sorted(cohorts.trained.elements()) == [5, 5]


def test_there_is_no_verdict_before_both_windows_are_full():
    cohorts = LengthCohorts(cohort_groups=1)
    for length in range(RECENT_BATCHES):
        assert drift_of(cohorts) is None
        cohorts.finish(length, [length], [length])
    assert drift_of(cohorts).distance == 0


def alarm_share(name, seed):
    """Share of alarms among the verdicts after every fourth batch of a simulated run."""
    pipeline = Pipeline(scenario(seed=seed, steps=60, schedule__rollout_batch_size=8, **SCHEDULES[name] | {
        "schedule__over_sampling_batch_size": 16 if name in ("april", "dropped") else None,
    }))  # fmt: skip
    note, said = pipeline.measures.record_step, []

    def look(step, batch):
        if step % 4 == 0 and (verdict := drift_of(pipeline.ledger.cohorts)):
            said.append(verdict.alarm)
        note(step, batch)

    pipeline.measures.record_step = look
    pipeline.run()
    assert len(said) > 8
    return sum(said) / len(said)


@pytest.mark.full
@pytest.mark.parametrize("name", ["sync", "april", "continuous"])
def test_the_alarm_is_silent_when_everything_is_trained(name):
    assert [alarm_share(name, seed) for seed in range(5)] == [0.0] * 5


@pytest.mark.parametrize("seed", [0, 1, full(2), full(3), full(4)])
def test_the_alarm_fires_when_unfinished_work_is_dropped(seed):
    assert alarm_share("dropped", seed) > 0.8


def test_drops_regardless_of_length_show_in_the_counts():
    cohorts = LengthCohorts(2)
    cohorts.finish(0, [5, 7], trained=[5, 7])
    cohorts.finish(1, [5, 7], trained=[])
    found = summarise_cohorts(cohorts)
    assert (found["ratio"], found["created"]["responses"], found["trained"]["responses"]) == (1.0, 4, 2)


def test_the_live_view_shows_the_length_alarm():
    record = {"step": 3, "lengths": {"drift": {"distance": 0.2, "band": 0.1, "alarm": True}}}
    assert "LENGTHS BIASED 0.200 > 0.100" in step_line(record, {})
    record["lengths"]["drift"]["alarm"] = False
    assert "BIASED" not in step_line(record, {})
