"""What benchmarks make of their measurements, on figures whose result can be seen."""

from importlib import import_module
from math import inf
from pathlib import Path
from types import SimpleNamespace as Has

import numpy as np
import pytest


@pytest.fixture(scope="module")
def module():
    """module(name) -> a benchmark; some of them set the number of threads when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield import_module


def test_a_row_is_the_median_of_its_measurements_unless_it_says_else(module):
    row = module("common").Row
    spread = {"name": "r", "unit": "s", "n": 4, "min": 1.0, "max": 8.0}
    assert row("r", [4.0, 1.0, 8.0, 2.0], "s").to_json() == spread | {"value": 3.0}
    assert row("r", [4.0, 1.0, 8.0, 2.0], "s", of=max).to_json() == spread | {"value": 8.0}


# --- adapters.py ----------------------------------------------------------------------------------------------


def test_the_speed_of_a_trainer_leaves_its_first_step_out_with_all_that_starting_up_takes(module, tmp_path):
    log = tmp_path / "trl.jsonl"
    log.write_text(
        "".join(f'{{"time": {t}, "reward": 0.5, "tokens": {n}}}\n' for t, n in ((90, 7), (92, 27), (94, 47)))
    )
    steps = module("adapters").steps_of_trl(log)
    assert steps.tokens == [7, 20, 20]
    assert (steps.tokens_per_s, steps.step_s) == (10.0, 2.0)


def test_what_of_a_gain_arrives_is_held_against_a_trainer_that_only_generates_faster(module, tmp_path):
    step = '{{"time": {time}, "reward": 0.5, "tokens": {tokens}, "generation_s": {made}}}\n'
    (tmp_path / "trl.jsonl").write_text(
        "".join(step.format(time=10 * k, tokens=100 * k, made=5 * k) for k in range(1, 4))
    )
    step = '{{"step": {k}, "time": {time}, "reward": 0.5, "tokens": 100, "rollout_tokens": 100, "rollout_s": 1.0}}\n'
    times = enumerate((6, 14, 20), 1)
    (tmp_path / "metrics.jsonl").write_text("".join(step.format(k=k, time=time) for k, time in times))
    gain = module("adapters").gain_of(tmp_path, tmp_path / "trl.jsonl")
    assert (gain.generation_share, gain.engine_gain) == (0.5, 5.0)
    assert gain.ratio == pytest.approx(20 / 14) and gain.possible == pytest.approx(1 / 0.6)
    assert gain.share == pytest.approx(0.6 * 20 / 14)


# --- rollout.py -----------------------------------------------------------------------------------------------


def with_lengths(*windows, steps):
    """An outcome of windows of `steps` batches, of which each batch has these lengths."""
    return Has(measures=Has(steps=[Has(lengths=lengths) for lengths in windows for _ in range(steps)]))


def test_of_all_windows_the_ratio_of_lengths_farthest_from_one_counts(module):
    rollout = module("rollout")
    sync = with_lengths([90, 110], [90, 110], [90, 110], steps=rollout.WINDOW_STEPS)
    ours = with_lengths([100, 104], [80, 100], [95, 105], steps=rollout.WINDOW_STEPS)
    assert rollout.window_ratios(ours, sync, np.mean) == pytest.approx(0.9)
    longer = with_lengths([115, 105], [95, 99], [100, 100], steps=rollout.WINDOW_STEPS)
    assert rollout.window_ratios(longer, sync, np.mean) == pytest.approx(1.1)
    del ours.measures.steps[-1], sync.measures.steps[-1]
    ours.measures.steps[-1].lengths = [1]
    assert rollout.window_ratios(ours, sync, np.mean) == pytest.approx(0.9), "a window that is not whole is left out"


def test_the_best_at_the_same_staleness_is_found_for_each_seed_among_those_that_are_no_staler(module):
    outcomes = {
        "april": [(100, 1.0), (200, 2.0)],
        "fresher": [(105, 0.9), (180, 1.9)],
        "as fresh": [(110, 1.0), (170, 2.0)],
        "staler": [(999, 1.1), (999, 2.1)],
    }
    of = {
        name: [Has(measures=Has(consumed_per_s=speed, staleness_mean=stale)) for speed, stale in seeds]
        for name, seeds in outcomes.items()
    }
    others = ["fresher", "as fresh", "staler"]
    best = module("rollout").best_at_same_staleness(Has(of=of.get), "april", others, "consumed_per_s")
    assert best == pytest.approx([1.10, 0.90])


# --- end_to_end.py, learning.py -------------------------------------------------------------------------------


def test_a_reward_is_reached_when_the_mean_over_the_last_steps_is(module):
    course = module("end_to_end").Course([10.0, 20.0, 30.0, 40.0, 50.0], [1.0, 0.0, 0.5, 0.7, 0.9], tokens=500)
    assert course.seconds_to(0.5) == 30.0, "the first step alone, 1.0, is no mean over three"
    assert course.seconds_to(0.6) == 50.0
    assert course.seconds_to(0.8) is None
    assert course.tokens_per_s == 10


def test_a_run_that_does_not_get_there_counts_with_its_last_second_and_never_to_our_favour(module):
    course = module("end_to_end").Course
    early, late, never = (
        course([10.0, 20.0, 30.0, 40.0], rewards, 0)
        for rewards in ([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    )
    ratio = module("end_to_end").ratio_of_times
    assert (ratio(early, late, 0.9), ratio(early, never, 0.9), ratio(never, early, 0.9)) == (0.75, 0.75, inf)
    seconds_to = module("learning").seconds_to
    assert [seconds_to(0.9, Has(course=run)) for run in (early, late, never)] == [30.0, 40.0, 40.0]


@pytest.mark.parametrize(
    ("differences", "p"),
    [([1, 2, 3, 4, 5], 1 / 32), ([2, 1], 1 / 4), ([1, -1], 3 / 4), ([-1, -2, -3], 1), ([0, 0, 0], 1)],
)
def test_the_p_of_a_difference_is_the_share_of_signs_that_give_as_large_a_mean(module, differences, p):
    assert module("learning").sign_flip_p(differences) == p


def test_a_two_sided_p_counts_means_as_far_from_zero_on_both_sides(module):
    p = module("learning").sign_flip_p
    assert p([1, 2, 3], two_sided=True) == p([-1, -2, -3], two_sided=True) == 1 / 4


def test_the_confidence_interval_is_students(module):
    half_width = module("learning").half_width
    assert half_width([1.0, 3.0]) == pytest.approx(12.71)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
