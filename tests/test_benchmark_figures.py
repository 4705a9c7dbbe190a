"""What benchmarks make of their measurements, on figures whose result can be seen."""

import asyncio
from dataclasses import fields
from importlib import import_module
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace as Has

import numpy as np
import pytest

from april.broker.handlers.lease_holders import sample_seed
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.simulate.scenario import Lengths, LengthsSection
from april.wire.message import Version
from april.workers.engines.base import Request
from tests.simulate.journals import add_group, recorded


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


# --- migration.py -----------------------------------------------------------------------------------------------


def test_what_moving_brings_is_a_batch_s_time_without_it_over_that_with_it_seed_by_seed(module):
    base = SimpleScenario()
    seconds = Has(submit=lambda work, one: Has(result=lambda: 10.0 if one["schedule__migrate"] else 11.0 + one["seed"]))
    rows = module("migration").rows_of(seconds, {"": base}, range(2))
    [row] = rows
    assert (row.name, row.measured, row.unit) == ("migration_gain", pytest.approx([0.1, 0.2]), "fraction")


class SimpleScenario(dict):
    def with_keys(self, **keys):
        return SimpleScenario(self | keys)


# --- rollout.py, rollout_real.py, rollout_turn.py -------------------------------------------------------------


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


def test_a_schedule_is_foretold_as_well_as_in_the_median_of_its_seeds_and_errors_do_not_cancel(module):
    errors = {"sync": [0.10, -0.30, 0.04], "april": [-0.20, 0.05, -0.07], "not foretold": [nan, nan, nan]}
    outcomes = {name: [Has(prediction_error=error) for error in seeds] for name, seeds in errors.items()}
    assert module("rollout_real").errors_by_schedule(outcomes) == [0.10, 0.07]


def turn_of(module, kind, **measured):
    turn = module("rollout_turn").Turn
    nothing = {field.name: 0 for field in fields(turn)}
    return turn(**nothing | measured | {"scenario": Has(slots_wanted=10, schedule=Has(kind=kind))})


@pytest.mark.parametrize(("kind", "cause"), [("sync", "barrier"), ("april", "barrier"), ("continuous", "admission")])
def test_a_slot_is_occupied_or_idle_for_one_cause(module, kind, cause):
    turn = turn_of(module, kind, leased=8.0, busy=6.0, updating=1.0)
    assert turn.idle_share == pytest.approx({cause: 0.2, "pipeline": 0.2, "update": 0.1})
    assert turn.occupancy + sum(turn.idle_share.values()) == pytest.approx(1)
    between_two_looks = turn_of(module, kind, leased=10.1, busy=10.2, updating=0.0)
    assert between_two_looks.idle_share == {cause: 0, "pipeline": 0, "update": 0}


# --- paced_prediction.py --------------------------------------------------------------------------------------


def test_the_lengths_of_a_run_are_known_group_by_group_and_what_was_unfinished_is_drawn_from_longer_ones(
    module, tmp_path
):
    ledger = Ledger(Rules(batch_groups=2, group_size=2, max_staleness=5, max_response_tokens=100))
    ledger.start_learner(0)
    with recorded(ledger, tmp_path):
        add_group(ledger, [20, 10], prompt_tokens=7)
        unfinished = add_group(ledger, [40, None])
        add_group(ledger, [31, 30])
        ledger.add_chunk(next(iter(ledger.leases)), 0, 25, Version(0, 1))
    groups = module("paced_prediction").completed(tmp_path / "journal", np.random.default_rng(0))
    assert [group.response_tokens for group in groups[:1] + groups[2:3]] == [[20, 10], [31, 30]]
    assert groups[0].prompt_tokens == 7
    first, drawn = groups[unfinished.id].response_tokens
    assert first == 40 and drawn in (30, 31, 40)


# --- forced_engine.py -------------------------------------------------------------------------------------------


def test_a_forced_length_is_that_of_its_sample_also_when_it_goes_on_elsewhere(module, monkeypatch):
    forced = module("forced_engine")
    lengths = Lengths(LengthsSection(family="pareto", alpha=1.1, smallest_tokens=16, longest_tokens=512), 2, seed=3)
    submitted = []
    monkeypatch.setattr(forced.PacedEngine, "submit", lambda self, request: submitted.append(request))
    monkeypatch.setattr(forced, "GROUPS", 4)
    engine = object.__new__(forced.ForcedEngine)
    engine.force(lengths, seed=3, longest=512)
    seed = sample_seed(3, 2, 1)
    for already in (0, 5):
        tokens = np.zeros(9 + already, np.int32)
        engine.submit(Request(1, tokens, 512 - already, seed, stop_token_ids=frozenset({2})))
    assert [one.max_new_tokens for one in submitted] == [lengths.of(2)[1], lengths.of(2)[1] - 5]
    assert not submitted[0].stop_token_ids


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
    assert [seconds_to(0.9, Has(course=one)) for one in (early, late, never)] == [30.0, 40.0, 40.0]


@pytest.mark.parametrize(
    ("differences", "p"),
    [([1, 2, 3, 4, 5], 1 / 32), ([2, 1], 1 / 4), ([1, -1], 3 / 4), ([-1, -2, -3], 1), ([0, 0, 0], 1)],
)
def test_the_p_of_a_difference_is_the_share_of_signs_that_give_as_large_a_mean(module, differences, p):
    assert module("learning").sign_flip_p(differences) == p


def test_the_confidence_interval_is_students(module):
    half_width = module("learning").half_width
    assert half_width([1.0, 3.0]) == pytest.approx(12.71)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)


def test_of_a_server_s_answer_what_it_did_not_find_in_its_cache_is_computed_again(module):
    """A prompt of 8 tokens, a response of 20 that was leased and 5 more; one answer begins, another goes on."""
    worker = watching(module, Has(_take=lambda run, event: None, _change_weights=None))
    run = Has(received=0, request=Has(id=7, tokens=np.zeros(28)), generated=[1] * 5)
    for received, found in ((0, 30), (0, 0), (3, 0)):
        run.received = received
        worker.engine._take(run, {"meta_info": {"completion_tokens": 1, "cached_tokens": found}})
    assert worker.reading.recomputed == 3 + 25


def test_a_server_is_updated_from_the_change_of_its_weights_to_its_next_token(module):
    async def change(load, expected):
        engine.generated_tokens += 4

    engine = Has(_take=None, _change_weights=change, live=3, generated_tokens=10)
    worker = watching(module, engine)
    asyncio.run(engine._change_weights(None, {}))
    assert worker._updating[1] == 14, "what the old weights still brought is no sign of the new"


def watching(module, engine):
    """A worker that watches this engine of a server."""
    forced_worker = module("forced_worker")
    worker = forced_worker.ForcedWorker.__new__(forced_worker.ForcedWorker)
    worker.engine, worker.works = engine, {7: Has(tokens=[np.zeros(8)])}
    worker.reading, worker._updating = forced_worker.Reading(0.0), None
    worker._watch_server(engine)
    return worker


# --- first_hour.py --------------------------------------------------------------------------------------------


def test_a_refusal_is_one_sentence_with_key_value_and_mend(module):
    misuse = module("misuses").key("learner.lr", "-1")
    good = "april run: key 'learner.lr' = -1 is refused; mend it in the file\n"
    assert misuse.objection(2, good) == ""
    assert misuse.objection(1, good) == "ended with status 1"
    assert misuse.objection(2, good + good) == "has 2 lines"
    assert misuse.objection(2, good.replace("-1", "it")) == "does not name '-1'"
    assert misuse.objection(2, good.partition(";")[0]) == "says no mend"
    assert misuse.objection(2, "Traceback (most recent call last):\n" + good) == "has a traceback"
    assert len(module("misuses").MISUSES) >= 60


def test_a_step_of_the_first_hour_has_to_print_and_to_write_what_it_says(module, tmp_path):
    first_hour = module("first_hour")
    assert len(first_hour.STEPS) >= 24
    assert all(step.prints or step.writes for step in first_hour.STEPS)
    step = first_hour.april("a run", "run my.toml", "^step 1/3", writes=("made/*.txt",))
    done = first_hour.Done(0, "plan: april\nstep 1/3 reward\n")
    assert done.objection(step, tmp_path) == "did not write ['made/*.txt']"
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "it.txt").touch()
    assert done.objection(step, tmp_path) == ""
    assert first_hour.Done(0, "a step 1/3").objection(step, tmp_path) == "did not print ['^step 1/3']"
    assert first_hour.Done(1, done.output).objection(step, tmp_path) == "ended with status 1"
