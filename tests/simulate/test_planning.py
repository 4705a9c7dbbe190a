"""Scenarios, lengths, traces, tuning, calibration and the commands around the simulated pipeline."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from april.cli import main
from april.cli.simulate import read_scenario
from april.config import ConfigError
from april.config.costs import EngineCost, shipped_costs
from april.simulate.calibrate import Timing, fit, measure
from april.simulate.pipeline import Pipeline
from april.simulate.probe import EngineProbe
from april.simulate.scenario import Lengths, LengthsSection, load_scenario
from april.simulate.sweep import buffers_experiment, sweeps
from april.simulate.trace import TracedGroup, read_trace, write_trace
from april.simulate.tune import tune
from april.simulate.variants import variants
from april.wire.message import Version
from april.workers.engines.base import EngineError
from april.workers.engines.embedded.decoder import read_shape

PUBLISHED = Path(__file__).parents[2] / "configs" / "published.toml"
COST = EngineCost(
    decode_base_s=5e-3, decode_running_s=1e-4, decode_kv_s=1e-8, prefill_s=1e-5, admit_s=2e-3, request_s=1e-3
)

SMALL = """
steps = 4
limit_responses = 300
[schedule]
kind = "april"
rollout_batch_size = 4
over_sampling_batch_size = 8
n_samples_per_prompt = 2
[lengths]
median_tokens = 200
longest_tokens = 1000
[engines]
count = 2
slots = 16
[cost]
decode_base_s = 0.01
decode_running_s = 0.0001
decode_kv_s = 0.0
prefill_s = 0.00001
"""
SYNC = ["--schedule.kind", "sync", "--over-sampling-batch-size", "4"]
ONLY_FRESH = ["--over-sampling-batch-size", "4", "--schedule.max_staleness", "0"]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


# --- lengths ------------------------------------------------------------------------------------------------


def drawn(groups=4000, **keys):
    return Lengths(LengthsSection(**keys), 8, seed=1).sample(groups)


def test_lognormal_lengths_have_the_median_and_the_spreads_they_were_given():
    lengths = drawn(median_tokens=1000, sigma_between=0.6, sigma_within=0.35, longest_tokens=10**6)
    logs = np.log(lengths)
    assert np.median(lengths) == pytest.approx(1000, rel=0.05)
    assert logs.var(axis=1, ddof=1).mean() == pytest.approx(0.35**2, rel=0.05)
    assert logs.mean(axis=1).var() == pytest.approx(0.6**2 + 0.35**2 / 8, rel=0.1)


def test_the_other_distributions_have_their_parameters():
    assert (drawn(10, family="equal", median_tokens=77) == 77).all()
    bimodal = drawn(family="bimodal", longest_tokens=50_000)
    assert set(np.unique(bimodal)) == {100, 50_000} and (bimodal == 50_000).mean() == pytest.approx(0.01, rel=0.15)
    pareto = drawn(family="pareto", alpha=1.2, longest_tokens=10**6)
    assert pareto.min() == 100 and (pareto > 1000).mean() == pytest.approx(10**-1.2, rel=0.1)


def test_responses_are_cut_at_the_budget_and_a_group_always_has_the_same_lengths():
    assert drawn(longest_tokens=3000).max() == 3000
    one, other = (Lengths(LengthsSection(), 8, seed=5) for _ in range(2))
    assert [one.of(group) for group in (5000, 3)] == [other.of(group) for group in (3, 5000)][::-1]
    assert one.of(3) != Lengths(LengthsSection(), 8, seed=6).of(3)


# --- traces -------------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_was_written_and_its_groups_are_drawn(tmp_path):
    groups = [TracedGroup(7, [10, 20]), TracedGroup(9, [300, 400])]
    path = tmp_path / "deep" / "trace.jsonl"
    write_trace(path, groups)
    assert read_trace(path) == groups
    lengths = Lengths(LengthsSection(family="trace", path=path), 2, seed=0)
    found = {(lengths.prompt_of(group), *sorted(lengths.of(group))) for group in range(50)}
    assert found == {(7, 10, 20), (9, 300, 400)}


def test_a_trace_in_order_is_replayed_again_and_again(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TracedGroup(7, [20, 10]), TracedGroup(9, [300, 400]), TracedGroup(8, [5, 5])])
    section = LengthsSection(family="trace", path=path, in_order=True)
    for seed in range(3):
        lengths = Lengths(section, 2, seed)
        assert [lengths.of(group) for group in range(4)] == [[20, 10], [300, 400], [5, 5], [20, 10]]
        assert lengths.of(1025) == lengths.of(1025 % 3) and lengths.prompt_of(1025) == lengths.prompt_of(1025 % 3)
    with pytest.raises(ConfigError, match=r"lengths.in_order' = true"):
        Lengths(LengthsSection(in_order=True), 2, seed=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no group"), ('{"prompt_tokens": 1}', "line 1"), ("\n{", "line 2"),
        ('{"prompt_tokens": 1, "response_tokens": [0]}', "line 1"),
        (None, r"trace.jsonl cannot be read \(Permission denied\)"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused(tmp_path, monkeypatch, text, said):
    """Text None: a file that may not be read, which root may."""

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "trace.jsonl"
    path.write_text(text or "")
    if text is None:
        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


# --- scenarios ----------------------------------------------------------------------------------------------


def test_the_published_scenario_has_the_published_setting():
    scenario = load_scenario(PUBLISHED)
    schedule = scenario.schedule
    assert (schedule.rollout_batch_size, schedule.groups_per_round, schedule.n_samples_per_prompt) == (32, 64, 8)
    lengths = scenario.lengths
    assert (lengths.family, lengths.median_tokens, lengths.sigma_between, lengths.sigma_within) == (
        "lognormal", 4500, 0.6, 0.35
    )  # fmt: skip
    assert lengths.longest_tokens == 16_384
    assert {load_scenario(PUBLISHED, cost=name).cost.source != "" for name in shipped_costs()} == {True}


PLAIN_COSTS = SMALL + "[costs.plain]\ndecode_base_s = 0.02"


@pytest.mark.parametrize(
    ("text", "overrides", "cost", "said"),
    [
        (SMALL, [("engines.cuont", 3)], None, r"unknown key 'engines.cuont' = 3; did you mean 'engines.count'"),
        (SMALL, [("cost.kv_tokens", 100)], None, "cost.kv_tokens"),
        (SMALL, [("lengths.family", "trace")], None, "lengths.path"),
        (SMALL, [("schedule.kind", "sync")], None, "over_sampling_batch_size"),
        ("[cost]", [], None, r"own.toml: key 'cost.decode_base_s' is missing; set it"),
        (PLAIN_COSTS, [], None, r"key 'cost' of .* stands beside costs.plain; .* \[costs.measured\]"),
        ("costs = 3", [], None, r"key 'costs' of .* write each as \[costs.NAME\]"),
        ("costs = { decode_base_s = 0.02 }", [], None, r"key 'costs' of .* write each as \[costs.NAME\]"),
        (SMALL, [], "h200", "h200"),
        (PUBLISHED.read_text(), [], "h200", "h100, mi300x, cpu, plain"),
    ],
)
def test_a_scenario_that_cannot_work_is_refused(tmp_path, text, overrides, cost, said):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_scenario(tmp_path / "own.toml", overrides, cost).make_lengths()


# --- tuning and calibration ---------------------------------------------------------------------------------


@pytest.mark.full
def test_tuning_takes_the_smallest_value_close_to_the_best_within_the_mean_staleness(small):
    free = tune(load_scenario(small))
    bounded = tune(load_scenario(small), most_staleness=0.8)
    assert free.key == "schedule.over_sampling_batch_size" and bounded.value < free.value
    assert "0.8" in bounded.why and "too stale" in bounded.table
    with pytest.raises(ConfigError, match="--mean-staleness"):
        tune(load_scenario(small), most_staleness=0.0)


def test_tuning_continuous_chooses_the_samples_in_flight(small, monkeypatch):
    monkeypatch.setattr("april.simulate.tune.TUNED_RESPONSES", 200)
    scenario = load_scenario(small, [("schedule.kind", "continuous")])
    choice = tune(scenario)
    assert choice.key == "schedule.in_flight" and 1 <= choice.value <= 32
    assert "\n20 " in tune(scenario.with_keys(engines__slots=10)).table, "all slots are tried, too"


def test_a_fit_recovers_the_costs_behind_the_timings(tmp_path):
    class Exact:
        slots, longest_response = 32, 4096

        def time(self, running, longest):
            kv, admissions, admitted = running * longest / 3, 128 // longest, running // 2
            return exact_timing(COST, running, kv, admissions, admitted)

    found = fit(measure(Exact()), "here", kv_tokens=90_000)
    expected = COST.model_dump(exclude={"source"}) | {"kv_tokens": 90_000}
    assert found.cost.model_dump(exclude={"source"}) == pytest.approx(expected, rel=1e-6)
    assert np.abs(found.errors).max() < 1e-6 and found.pause_s == 0.02
    path = tmp_path / "measured.toml"
    path.write_text(found.to_toml())
    scenario = load_scenario(path)
    assert scenario.cost == found.cost and scenario.weights.pause_s == 0.02 and not scenario.weights.keep_kv
    assert scenario.engines.prefix_cache
    assert "KV cache: 90,000 tokens" in found.describe()


def test_an_unknown_cache_size_is_left_out_and_reported():
    found = fit([exact_timing(COST, running, 100, running, running) for running in (1, 8)], "")
    assert "kv_tokens" not in found.to_toml() and "does not say" in found.describe()


def test_a_fit_has_no_negative_costs():
    """Steps that become shorter with more in the cache are noise."""
    odd = COST.model_copy(update={"decode_kv_s": -1e-8})
    grid = [(running, kv) for running in (1, 8) for kv in (100, 1000, 9000)]
    cost = fit([exact_timing(odd, running, kv, running, 2 * running) for running, kv in grid], "").cost
    assert cost.decode_kv_s == 0 and cost.decode_running_s >= 0 and cost.decode_base_s > 0


def test_a_prefill_of_zero_seconds_is_ignored_by_the_fit():
    timings = [exact_timing(COST, running, kv, running, 2 * running) for running in (1, 2, 8) for kv in (100, 1000)]
    timings[0] = replace(timings[0], prefill_s=0.0)
    assert np.abs(fit(timings, "").errors).max() < 1e-6


def exact_timing(cost, running, kv, admissions, admitted):
    """The timing of an engine that follows the cost model exactly."""
    step_s = cost.decode_base_s + cost.decode_running_s * running + cost.decode_kv_s * kv
    admit_s = cost.admit_s * admissions + cost.request_s * admitted + cost.prefill_s * 8 * admitted
    return Timing(
        running, 100.0, kv, admissions, admitted, 8 * admitted, 100 * step_s + admit_s, 0.02, round(kv),
        cost.context_s(running, round(kv)),
    )  # fmt: skip


@pytest.mark.full
def test_calibrating_times_the_engine_of_a_run(policy_folder, tmp_path, capsys):
    path = tmp_path / "cost.toml"
    assert main(["calibrate", "--model", str(policy_folder), "--slots", "2", "--out", str(path)]) == 0
    scenario = load_scenario(path, [("lengths.longest_tokens", 100)])
    cost = scenario.cost
    assert not scenario.engines.prefix_cache
    assert "measured on the torch engine with 2 slots" in cost.source
    assert cost.kv_tokens == 2 * read_shape(policy_folder).max_positions
    assert "prefill = " in capsys.readouterr().out
    assert main(["calibrate", "--model", str(policy_folder), "--out", str(path), "--worker.engine", "none"]) == 2
    assert "worker.engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine.pause", "in_place"], "key 'engine.pause' = 'in_place' leaves no prefill"),
        (["--model", "WEIGHTLESS"], "holds no .safetensors file"),
        (["--worker.device", "cuda"], "key 'worker.device' = 'cuda' finds no accelerator"),
        (["--out", "."], "option '--out' = '.' cannot be written"),
    ],
)
def test_a_calibration_that_cannot_work_is_refused_with_a_sentence(
    policy_folder, tmp_path, capsys, monkeypatch, words, said
):
    """Before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shutil.copytree(policy_folder, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    words = [str(tmp_path / "weightless") if word == "WEIGHTLESS" else word for word in words]
    out = tmp_path / "cost.toml"
    assert main(["calibrate", "--model", str(policy_folder), "--slots", "2", "--out", str(out), *words]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


class Stalled:
    """An engine that generates nothing any more: its server is gone, or refuses what it is asked."""

    max_context, generated_tokens = 64, 0

    def __init__(self, version, failures):
        self.version, self._failures = version, failures

    def load_weights(self, version, tensors): ...
    def submit(self, request): ...
    def step(self):
        return []

    def failures(self):
        return self._failures


@pytest.mark.parametrize(
    ("version", "failures", "said"), [(None, [], "server was lost"), (Version(0, 0), [(1, "no room")], "no room")]
)
def test_calibrating_does_not_wait_for_an_engine_that_is_lost(version, failures, said):
    with pytest.raises(EngineError, match=said):
        EngineProbe(Stalled(version, failures), 32, 2, {}).time(2, 16)


# --- commands -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_commands_print_tables_and_draw_pictures(small, tmp_path, capsys):
    assert main(["simulate", str(small), "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "consumed/s" in out and "continuous, 16 in flight" in out
    for name in ("lengths", "buffers", "versions"):
        assert main(["simulate", str(small), "--experiment", name, "--out", str(tmp_path)]) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "buffer_peak_tokens" in out and "p99 over median" in out and "age (policy steps)" in out
    assert main(["simulate", str(small), "--sweep", "--out", str(tmp_path), "--steps", "2"]) == 0
    assert len(list(tmp_path.glob("sweep-*.png"))) == 4
    assert main(["tune", str(small)]) == 0
    assert "schedule.over_sampling_batch_size = " in capsys.readouterr().out


def test_a_schedule_that_the_bound_refuses_is_left_out_and_reported(small, capsys):
    """Overlap with N' = 2 N needs S = 2."""
    assert main(["simulate", str(small), "--schedule.max_staleness", "1"]) == 0
    out = capsys.readouterr().out
    assert "left out: april, N' = 8, overlap: key 'schedule.over_sampling_batch_size' = 8 exceeds 4" in out
    assert "continuous, 16 in flight" in out and out.count("left out") == 1


@pytest.mark.full
def test_sweeps_keep_the_scenario_s_schedule_keys(small):
    dropped = load_scenario(small, [("schedule.partial_rollout", False), ("schedule.overlap", True), ("steps", 4)])
    found = [outcome for _, outcome in [*sweeps(dropped)[0].points, *buffers_experiment(dropped)[1]]]
    assert all(one.scenario.schedule.overlap and not one.scenario.schedule.partial_rollout for one in found)
    flowing = load_scenario(small, [("schedule.kind", "continuous"), ("schedule.in_flight", 11), ("steps", 4)])
    assert "continuous, 11 in flight" in variants(flowing)[0]
    _, flights, bounds, engines = sweeps(flowing)
    assert 11 in [count for count, _ in flights.points]
    assert {one.scenario.schedule.in_flight for sweep in (bounds, engines) for _, one in sweep.points} == {11}


@pytest.mark.full
def test_without_matplotlib_tables_are_printed_with_a_hint(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", str(small), "--sweep", "--out", str(tmp_path), "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("april-rl[report]") == out.count("consumed/s") == 4


@pytest.mark.full
def test_tuning_takes_lengths_from_a_trace(small, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TracedGroup(5, [100, 100])])
    assert main(["tune", str(small), "--trace", str(trace)]) == 0
    assert "schedule.over_sampling_batch_size = " in capsys.readouterr().out
    assert main(["tune", str(small), "--trace", str(tmp_path / "none")]) == 2
    assert "april trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "words", "budget"),
    [
        (TracedGroup(5, [100, 90], 3000), [], 3000),
        (TracedGroup(5, [100, 5000]), [], 5000),
        (TracedGroup(5, [100, 5000]), ["--lengths.longest_tokens", "70"], 70),
    ],
    ids=["of the run", "unknown", "another is asked for"],
)
def test_a_trace_sets_the_budget_of_its_run(small, tmp_path, group, words, budget):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [group])
    scenario = read_scenario(small, None, words, trace)
    assert scenario.lengths.longest_tokens == Pipeline(scenario).ledger.rules.max_response_tokens == budget


def test_a_traced_prompt_must_fit_into_the_cache_with_its_responses(small, tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TracedGroup(900, [10], 500), TracedGroup(5, [500], 500)])
    assert read_scenario(small, None, ["--cost.kv_tokens", "910"], trace).cost.kv_tokens == 910
    with pytest.raises(ConfigError, match=r"'cost\.kv_tokens' = 909 .*910"):
        read_scenario(small, None, ["--cost.kv_tokens", "909"], trace)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engines.slots", "0"], "engines.slots"),
        (["--over-sampling-batch-size", "auto"], "'schedule.over_sampling_batch_size' = 'auto' is for"),
        (["--schedule.kind", "continuous", "--schedule.in_flight", "auto"], "'schedule.in_flight' = 'auto' is for"),
        (["--experiment", "buffers", *ONLY_FRESH], "'schedule.max_staleness' = 0 admits no N' above N"),
        (["--sweep", *ONLY_FRESH], "'schedule.max_staleness' = 0 admits no N' above N"),
        (["--sweep", *SYNC], "'schedule.kind' = 'sync' has no dial to set here; use 'april' or 'continuous'"),
        (["--experiment", "buffers", "--schedule.kind", "continuous"], "no dial to set here; use 'april', or"),
        (["--schedule.kind", "tests.simulate.test_planning:no_such"], "tests.simulate.test_planning has no 'no_such'"),
    ],
)
def test_a_command_that_cannot_work_is_refused_with_a_sentence(small, tmp_path, capsys, words, said):
    assert main(["simulate", str(small), *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["--sweep"], ["--experiment", "lengths"]])
def test_pictures_that_cannot_be_written_are_refused_before_anything_is_simulated(small, tmp_path, capsys, command):
    (tmp_path / "file").touch()
    assert main(["simulate", str(small), *command, "--out", str(tmp_path / "file")]) == 2
    printed = capsys.readouterr()
    assert "option '--out'" in printed.err and printed.err.count("\n") == 1 and not printed.out
