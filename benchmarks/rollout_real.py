"""The schedules on a real engine with forced lengths, beside its limit and beside what the simulator foretells.

The learner is its own loop with a wait in place of training; the weights that it publishes are real. The engine has a
core of its own, everything else another.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from common import Row
from pinned_engine import PROMPT_TOKENS, PinnedEngine
from rollout_turn import Turn, run_turn

from april.simulate.calibrate import COSTS
from april.simulate.pipeline import simulate
from april.simulate.scenario import Scenario, load_scenario
from april.simulate.variants import text_table, variants, with_schedule

GROUP_SIZE = 8
LONGEST = 466
SETTING = f"""
[lengths]
median_tokens = 128
sigma_between = 0.6
sigma_within = 0.35
longest_tokens = {LONGEST}
prompt_tokens = {PROMPT_TOKENS}
[learner]
token_s = 8e-6
[schedule]
kind = "april"
n_samples_per_prompt = {GROUP_SIZE}
max_staleness = 5
"""
"""The published one (`configs/published.toml`) with responses a thirty-fifth as long and fewer of them."""
GROUPS = {"torch": 8, "sglang": 4}
"""N; N' is twice that, and the slots are as many as samples in N' groups"""
PIPELINE_STEPS = 8
EQUAL = {"lengths__family": "equal", "lengths__median_tokens": 100, "warmup_steps": 3}
UNKNOWN = "[cost]\ndecode_base_s = 1.0\ndecode_running_s = 0.0\ndecode_kv_s = 0.0\nprefill_s = 0.0\n"


@dataclass(frozen=True)
class Outcome:
    """One turn, and what there was beside it."""

    turn: Turn
    limit: float
    """Tokens/s of the engine driven directly with as many samples in flight."""
    predicted: float
    """Consumed tokens/s of the simulated run, see `predicted_speed`."""

    @property
    def limit_share(self) -> float:
        return self.turn.consumed_per_s / self.limit

    @property
    def generated_limit_share(self) -> float:
        """Speed of tokens generated and not dropped, trained or not, over the limit."""
        return self.turn.kept_per_s / self.limit

    @property
    def cap(self) -> float:
        return self.turn.scenario.cap(self.turn.scenario.make_lengths())

    @property
    def prediction_error(self) -> float:
        return self.predicted / self.turn.consumed_per_s - 1


COLUMNS: dict[str, tuple[Callable[[Outcome], float], str]] = {
    "consumed/s": (lambda run: run.turn.consumed_per_s, ",.0f"),
    "in rollout": (lambda run: run.turn.consumed_per_rollout_s, ",.0f"),
    "generated/s": (lambda run: run.turn.generated / run.turn.time_s, ",.0f"),
    "gen. in rollout": (lambda run: run.turn.generated / run.turn.rollout_s, ",.0f"),
    "wasted": (lambda run: run.turn.discarded / run.turn.generated, ".1%"),
    "recomputed": (lambda run: run.turn.recomputed / run.turn.generated, ".1%"),
    "occupied": (lambda run: run.turn.occupancy, ".1%"),
    "stale mean": (lambda run: run.turn.staleness_mean, ".2f"),
    "max": (lambda run: max(run.turn.ages), ".0f"),
    "off-policy": (lambda run: run.turn.off_policy_share, ".1%"),
    "step p50 s": (lambda run: np.percentile(run.turn.step_times_s, 50), ".2f"),
    "p95 s": (lambda run: np.percentile(run.turn.step_times_s, 95), ".2f"),
    "taken": (lambda run: run.turn.taken, ".0%"),
    "limit/s": (lambda run: run.limit, ",.0f"),
    "of limit": (lambda run: run.limit_share, ".3f"),
    "cap": (lambda run: run.cap, ".3f"),
    "of cap": (lambda run: run.limit_share / run.cap, ".3f"),
    "buffer peak": (lambda run: run.turn.buffer_peak_tokens, ",.0f"),
    "foretold/s": (lambda run: run.predicted, ",.0f"),
    "off by": (lambda run: run.prediction_error, "+.1%"),
}


def schedules(base: Scenario) -> dict[str, Scenario]:
    """Schedules of `april simulate`: contexts are computed again after updates; `continuous` also keeps its cache."""
    found = {}
    for name, scenario in variants(base)[0].items():
        if "recomputed" not in name:
            found[name] = scenario
        if name in found and scenario.schedule.kind == "continuous":
            found[f"{name}, cache kept"] = scenario.with_keys(weights__keep_kv=True)
    return found


def select_schedules(base: Scenario, only: Sequence[str]) -> dict[str, Scenario]:
    """The schedules of these names, or all."""
    known = schedules(base)
    if strange := [name for name in only if name not in known]:
        sys.exit(f"--only {strange[0]!r} is none of the schedules; give some of {', '.join(map(repr, known))}")
    return {name: scenario for name, scenario in known.items() if not only or name in only}


def scenario_of(kind: str, cost: Path | None, folder: Path, seed: int, steps: int) -> Scenario:
    """The scenario of an engine. `cost`: sections that `april calibrate` has written; None if there are none yet."""
    path, samples = folder / "setting.toml", GROUPS[kind] * GROUP_SIZE
    path.write_text(SETTING + (cost.read_text() if cost else UNKNOWN))
    keys = {
        "seed": seed, "steps": steps, "limit_responses": steps * samples,
        "engines.count": 1, "engines.slots": 2 * samples,
        "schedule.rollout_batch_size": GROUPS[kind], "schedule.over_sampling_batch_size": 2 * GROUPS[kind],
        "engines.prefix_cache": kind == "sglang",
    }  # fmt: skip
    return load_scenario(path, list(keys.items()))


def calibrate(engine: PinnedEngine, folder: Path, seed: int, steps: int) -> Scenario:
    """The scenario of a seed, with the costs of the engine as it is now and, from runs with equal lengths, of the
    pipeline: the way of a grant, by Little's law, and what a round takes beyond its generation and training."""
    cost, samples = folder / "cost.toml", GROUPS[engine.kind] * GROUP_SIZE
    print(engine.calibrate(cost), flush=True)
    equal = scenario_of(engine.kind, cost, folder, 0, PIPELINE_STEPS).with_keys(**EQUAL)
    flowing = run_turn(engine, with_schedule(equal, "continuous", in_flight=samples), new_folder(folder / "flowing"))
    latency_s = max(0.0, flowing.leased - flowing.busy) * flowing.time_s / (PIPELINE_STEPS * samples)
    rounds = with_schedule(equal, "sync").with_keys(engines__latency_s=latency_s)
    measured_s = median(run_turn(engine, rounds, new_folder(folder / "rounds")).step_times_s)
    transfer_s = max(0.0, measured_s - simulate(rounds).step_s[0])
    print(f"a grant arrives after {latency_s * 1e3:.1f} ms; a round takes {transfer_s * 1e3:.1f} ms more\n", flush=True)
    costs = {"engines__latency_s": latency_s, "weights__transfer_s": transfer_s}
    return scenario_of(engine.kind, cost, folder, seed, steps).with_keys(**costs)


def with_costs_between(engine: PinnedEngine, scenario: Scenario, before: Path, after: Path) -> Scenario:
    """The scenario with the mean costs of the calibrations before and after its turn: the machine's speed drifts."""
    measured = [scenario_of(engine.kind, cost, cost.parent, 0, 1) for cost in (before, after)]
    costs = {f"cost__{name}": float(np.mean([getattr(known.cost, name) for known in measured])) for name in COSTS}
    return scenario.with_keys(**costs, weights__pause_s=float(np.mean([known.weights.pause_s for known in measured])))


def new_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def measure(kind: str, seeds: range, steps: int, only: Sequence[str] = ()) -> tuple[list[Row], dict]:
    """Every schedule and every limit once for each seed, in an order that turns round from seed to seed, with a
    calibration before the first and after each turn that is foretold. Returns the rows, and the values of the table's
    columns by schedule, a list over the seeds each. `only`: see `select_schedules`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="april-rollout-") as made:
        folder = Path(made)
        setting = scenario_of(kind, None, folder, 0, 1)
        called = dict(zip(schedules(setting), LABELS, strict=True))
        select_schedules(setting, only)
        engine = PinnedEngine(kind, folder, setting.engines.slots, LONGEST)
        try:
            found = [
                measure_seed(engine, calibrate(engine, new_folder(folder / f"costs-{seed}"), seed, steps), only)
                for seed in seeds
            ]
        finally:
            engine.close()
    by_name = {name: [outcomes[name] for outcomes in found] for name in found[0]}
    lines = [[name, *(cell(ones, *column) for column in COLUMNS.values())] for name, ones in by_name.items()]
    print(f"medians of {len(seeds)} seeds\n{text_table(lines, ('', *COLUMNS))}\n", flush=True)
    values = {
        name: {column: [float(value(run)) for run in ones] for column, (value, _) in COLUMNS.items()}
        for name, ones in by_name.items()
    }
    by_label = {called[name]: outcomes for name, outcomes in by_name.items()}
    return rows(kind, by_label), values


def cell(outcomes: list[Outcome], value: Callable[[Outcome], float], form: str) -> str:
    return format(median(map(value, outcomes)), form)


def measure_seed(engine: PinnedEngine, base: Scenario, only: Sequence[str]) -> dict[str, Outcome]:
    runs = select_schedules(base, only)
    beside = {limit_name(engine, scenario) for scenario in runs.values() if scenario.schedule.kind == "continuous"}
    limits, order = {}, []
    for name, scenario in runs.items():
        limit = limit_name(engine, scenario)
        if limit not in limits and (scenario.schedule.kind == "continuous" or limit not in beside):
            limits[limit] = scenario
            order.append(limit)
        order.append(name)
    turns: dict[str, Turn | float] = {}
    known: dict[str, Scenario] = {}
    cost = engine.folder / f"costs-{base.seed}" / "cost.toml"
    for name in order if base.seed % 2 == 0 else reversed(order):
        folder = new_folder(engine.folder / f"seed-{base.seed}" / name.replace(" ", "-"))
        if name in limits:
            turns[name] = engine.limit(folder, limits[name])
            said = f"{turns[name]:,.0f} tokens/s"
        else:
            turns[name] = run_turn(engine, runs[name], folder)
            said = f"{turns[name].consumed_per_s:,.0f} tokens/s"
            before, cost = cost, folder / "cost.toml"
            engine.calibrate(cost)
            known[name] = with_costs_between(engine, runs[name], before, cost)
        print(f"  seed {base.seed}, {name}: {said}", file=sys.stderr, flush=True)
    return {
        name: Outcome(turns[name], turns[limit_name(engine, scenario)], predicted_speed(engine, known[name]))
        for name, scenario in runs.items()
    }


def limit_name(engine: PinnedEngine, scenario: Scenario) -> str:
    by_token = ", token by token" if engine.sends_each_token(scenario) else ""
    return f"limit with {scenario.slots_wanted} in flight{by_token}"


def predicted_speed(engine: PinnedEngine, scenario: Scenario) -> float:
    """Consumed tokens/s of the simulated run; not a number where the costs are those of another way to send tokens."""
    return nan if engine.sends_each_token(scenario) else simulate(scenario).consumed_per_s


LABELS = ("sync", "sync_equal", "april", "dropped", "overlap", "fewer", "fewer_kept", "most", "most_kept")
"""Labels of `schedules`, in their order."""


def rows(kind: str, outcomes: dict[str, list[Outcome]]) -> list[Row]:
    """By `LABELS`; those for which all that they compare was run."""
    gains = {
        f"april_gain_{kind}": ("april", "sync"),
        f"april_gain_equal_concurrency_{kind}": ("april", "sync_equal"),
        f"partial_rollout_gain_{kind}": ("april", "dropped"),
        f"overlap_gain_equal_concurrency_{kind}": ("overlap", "sync_equal"),
        f"continuous_gain_{kind}": ("most_kept", "sync"),
        f"continuous_gain_{kind}_reprefill": ("most", "sync"),
        f"continuous_gain_equal_concurrency_{kind}": ("most_kept", "sync_equal"),
        f"continuous_gain_equal_concurrency_{kind}_reprefill": ("most", "sync_equal"),
    }
    speeds = {"": "consumed_per_s", "_rollout_time": "consumed_per_rollout_s", "_kept_tokens": "kept_per_s"}
    found = []
    for name, pair in gains.items():
        if not {*pair} <= outcomes.keys():
            continue
        for suffix, value in speeds.items():
            ratios = [
                getattr(a.turn, value) / getattr(b.turn, value) - 1
                for a, b in zip(*(outcomes[label] for label in pair), strict=True)
            ]
            found.append(Row(f"{name}{suffix}", ratios, "fraction"))
    limited = {"": "fewer_kept", "_reprefill": "fewer", "_most": "most_kept", "_most_reprefill": "most"}
    for suffix, label in limited.items():
        if ones := outcomes.get(label):
            found.append(Row(f"continuous_limit_{kind}{suffix}", [run.limit_share for run in ones], "fraction"))
            shares = [run.generated_limit_share for run in ones]
            found.append(Row(f"continuous_generated_limit_{kind}{suffix}", shares, "fraction"))
    if fewer := outcomes.get("fewer"):
        found.append(Row(f"idle_slot_share_total_{kind}", [1 - run.turn.occupancy for run in fewer], "fraction"))
        for cause in fewer[0].turn.idle_share:
            shares = [run.turn.idle_share[cause] for run in fewer]
            found.append(Row(f"idle_slot_share_{cause}_{kind}", shares, "fraction"))
    errors = errors_by_schedule(outcomes)
    return [*found, *([Row("prediction_error_max", errors, "fraction", of=max)] if errors else [])]


def errors_by_schedule(outcomes: dict[str, list[Outcome]]) -> list[float]:
    """By how much the simulator is off for each schedule that it foretells: the relative error, without its sign,
    median of the seeds."""
    errors = [median(abs(run.prediction_error) for run in of_seeds) for of_seeds in outcomes.values()]
    return [error for error in errors if not isnan(error)]
