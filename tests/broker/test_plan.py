"""The throughput that the staleness bound permits, and the plan of a dry run that names it."""

import pytest

from april import config as configuration
from april.broker.plan import advice, describe_plan, throughput_cap
from april.config import ScheduleSection


def test_the_throughput_cap_follows_from_the_groups_trainable_during_the_longest_response():
    """A response of 1,000 tokens takes 1,000 steps of 64 slots: 64,000 tokens, or 80 groups of 8 x 100 tokens. Two
    batches of 20 groups can be trained meanwhile: half."""
    assert throughput_cap(2, 20, 8, in_flight=64, mean_length=100, longest=1000) == 0.5


def test_a_short_enough_tail_leaves_the_full_throughput():
    assert throughput_cap(6, 32, 8, in_flight=384, mean_length=100, longest=400) == 1.0
    assert throughput_cap(6, 32, 8, in_flight=384, mean_length=100, longest=401) < 1.0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "continuous", "in_flight": 384}, ["384 samples", "at most 4 times the mean", "at 10 times 40%"]),
        ({"kind": "continuous"}, ["256 samples", "at most 6 times", "at 10 times 60%"]),
        ({"over_sampling_batch_size": 64}, ["512 samples", "the bound", "at most 3 times", "30% of it"]),
        ({"over_sampling_batch_size": 64, "overlap": True}, ["at most 2.5 times", "25% of it"]),
        ({"kind": "sync"}, ["256 samples", "waiting for the longest", "at most 1 times", "10% of it"]),
        ({"over_sampling_batch_size": 8}, ["64 samples", "waiting for the longest", "at most 1 times", "10% of it"]),
        ({"over_sampling_batch_size": 64, "partial_rollout": False}, ["512 samples", "discarded"]),
    ],
)
def test_the_plan_names_samples_in_flight_and_throughput_cap(schedule, expected):
    plan = describe_plan(ScheduleSection(**schedule))
    for part in expected:
        assert part in plan


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ""),
        ({"algorithm.preset": "dapo"}, "algorithm.preset = 'dapo' corrects no stale token, and some may be up to 5"),
        ({"algorithm.preset": "dapo", "algorithm.behaviour_coef": "0.3"}, ""),
        ({"algorithm.preset": "dapo", "algorithm.proximal": "interpolated"}, ""),
        ({"algorithm.corrections": "[]", "algorithm.behaviour_coef": "0"}, "algorithm.corrections = [] corrects no"),
        ({"algorithm.preset": "gspo", "schedule.kind": "sync", "schedule.over_sampling_batch_size": "4"}, ""),
        ({"algorithm.preset": "gspo", "schedule.max_staleness": "0", "schedule.over_sampling_batch_size": "4"}, ""),
        (
            {"algorithm.preset": "gspo", "schedule.overlap": "true", "schedule.over_sampling_batch_size": "4"},
            "algorithm.preset = 'gspo'",
        ),
    ],
)
def test_uncorrected_stale_tokens_are_advised_against(config_file, keys, expected):
    overrides = [word for key, value in keys.items() for word in (f"--{key}", value)]
    found = advice(configuration.load(config_file, overrides))
    assert found.startswith(expected) and bool(found) == bool(expected)
    assert not found or found.endswith(
        "algorithm.proximal = 'recomputed', algorithm.corrections = ['truncated_sequence'], "
        "algorithm.behaviour_coef = 0.3"
    )
