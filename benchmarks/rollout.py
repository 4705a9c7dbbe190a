"""Rollout throughput by schedule, in consumed tokens/s: on a real engine, or the published setting on a virtual clock.

Simulated rows depend on the scenario and the seed alone, not on the machine. Without a suffix they are those of the
scenario's first cost model; the others have its name as a suffix.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import migration
import numpy as np
from common import Row, parser, report

from april.broker.telemetry.lengths import drift_of
from april.simulate.pipeline import Pipeline
from april.simulate.scenario import Scenario, load_scenario
from april.simulate.variants import COLUMNS, SimulationResult, columns, evaluate, table, variants, with_schedule

PUBLISHED = Path(__file__).parent.parent / "configs" / "published.toml"
COSTS = ("h100", "mi300x", "plain")
BESIDE_COSTS = ("extreme", "alarms", "migration")
"""parts that are not a cost model's"""
MIGRATED = ("h100", "mi300x", "cpu")
"""cost models on which stragglers move"""
OVER_SAMPLED = (1.5, 2, 3)
"""N' over N for the comparison at equal staleness"""
IN_FLIGHT = (96, 128, 192, 256, 320, 384, 448, 512)
"""of `continuous`, from which the best at a staleness is chosen"""
OVERLAPPED = (42, 44, 45, 46, 56, 60, 64, 80)
"""N' of `april` with overlap, likewise"""
LOOSE = {"schedule__max_staleness": 240, "warmup_steps": 350, "steps": 250, "limit_responses": 100_000}
"""a bound so large that the cap is 1 for the extreme lengths, and a run that is long against the longest of them"""
BIMODAL = {"lengths__family": "bimodal", "lengths__longest_tokens": 50_000}
"""1 % of 50,000 tokens, the rest 100"""
ALARM_SEEDS = 5
PARETO = {
    "lengths__family": "pareto",
    "lengths__smallest_tokens": 100,
    "lengths__alpha": 1.2,
    "lengths__longest_tokens": 50_000,
}


class Results:
    """Outcomes of scenarios, each simulated once, and the rows made of them over all seeds."""

    def __init__(self, pool: ProcessPoolExecutor, seeds: range):
        self.pool, self.seeds = pool, seeds
        self._waiting: dict[str, list] = {}

    def start(self, scenario: Scenario) -> list:
        key = scenario.model_dump_json()
        if key not in self._waiting:
            seeded = [scenario.with_keys(seed=seed) for seed in self.seeds]
            self._waiting[key] = [self.pool.submit(evaluate, "", one) for one in seeded]
        return self._waiting[key]

    def of(self, scenario: Scenario) -> list[SimulationResult]:
        return [waiting.result() for waiting in self.start(scenario)]

    def gain(self, ours: Scenario, theirs: Scenario) -> list[float]:
        """Consumed tokens/s over wall time, ours over theirs less 1, seed by seed."""
        return [a.consumed_per_s / b.consumed_per_s - 1 for a, b in zip(self.of(ours), self.of(theirs), strict=True)]

    def gain_in_rollout(self, ours: Scenario, theirs: Scenario) -> list[float]:
        return [
            a.measures.consumed_per_rollout_s / b.measures.consumed_per_rollout_s - 1
            for a, b in zip(self.of(ours), self.of(theirs), strict=True)
        ]


def best_at_same_staleness(results: Results, april: Scenario, others: list[Scenario], speed: str) -> list[float]:
    """The `speed` of the best of `others` with no higher mean staleness, over that of `april`; seed by seed."""
    ratios = []
    for place, reached in enumerate(results.of(april)):
        candidates = [results.of(other)[place].measures for other in others]
        fresh = [one for one in candidates if one.staleness_mean <= reached.measures.staleness_mean]
        ratios.append(max(getattr(one, speed) for one in fresh) / getattr(reached.measures, speed))
    return ratios


WINDOW_STEPS = 20
"""in which the lengths trained are compared with those of `sync`"""


def window_ratios(ours: SimulationResult, sync: SimulationResult, statistic) -> float:
    """Of the lengths trained in each window over those that `sync` trains in it, the ratio farthest from 1."""
    ratios = []
    for start in range(0, len(sync.measures.steps) - WINDOW_STEPS + 1, WINDOW_STEPS):
        mine, theirs = (
            np.concatenate([step.lengths for step in one.measures.steps[start : start + WINDOW_STEPS]])
            for one in (ours, sync)
        )
        ratios.append(statistic(mine) / statistic(theirs))
    return farthest_from_one(ratios)


def farthest_from_one(ratios: list[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def p95(lengths: np.ndarray) -> float:
    return float(np.percentile(lengths, 95))


def simulated_rows(results: Results, base: Scenario, suffix: str) -> list[Row]:
    """The rows of one cost model."""
    n = base.schedule.n_samples_per_prompt
    sync = with_schedule(base, "sync")
    sync_equal = with_schedule(base, "sync", rollout_batch_size=64)
    april = with_schedule(base, "april", over_sampling_batch_size=64)
    dropped = with_schedule(base, "april", over_sampling_batch_size=64, partial_rollout=False)
    continuous = {count: with_schedule(base, "continuous", in_flight=count) for count in IN_FLIGHT}
    most = continuous[64 * n]
    recomputed = most.with_keys(weights__keep_kv=False)
    aprils = [with_schedule(base, "april", over_sampling_batch_size=round(32 * factor)) for factor in OVER_SAMPLED]
    overlaps = [with_schedule(base, "april", over_sampling_batch_size=groups, overlap=True) for groups in OVERLAPPED]
    overlap = overlaps[OVERLAPPED.index(64)]
    equal = {"lengths__family": "equal"}
    april_equal, sync_equal_lengths = april.with_keys(**equal), sync_equal.with_keys(**equal)
    settling_steps = base.schedule.max_staleness + 1
    first = [one.with_keys(warmup_steps=0, steps=settling_steps) for one in (sync, april, most)]
    settled = [one.with_keys(warmup_steps=settling_steps) for one in (sync, april, most)]
    for scenario in (*first, *settled, sync, sync_equal, april, dropped, *continuous.values(), recomputed, *aprils,
                     *overlaps, april_equal, sync_equal_lengths):  # fmt: skip
        results.start(scenario)

    same_staleness = {}
    for time, speed in (("", "consumed_per_s"), ("_rollout_time", "consumed_per_rollout_s")):
        found = [best_at_same_staleness(results, one, [*continuous.values(), *overlaps], speed) for one in aprils]
        same_staleness[time] = [min(seed) for seed in zip(*found, strict=True)]
        same_staleness |= {f"_{factor:g}N{time}": ratios for factor, ratios in zip(OVER_SAMPLED, found, strict=True)}
    in_flight_256, in_flight_512 = results.of(continuous[256]), results.of(most)
    gains = {
        "april_gain_simulated": (april, sync),
        "april_gain_simulated_equal_concurrency": (april, sync_equal),
        "continuous_gain_simulated_equal_concurrency": (most, sync_equal),
        "continuous_gain_simulated_reprefill": (recomputed, sync_equal),
    }
    ratios = {
        "continuous_vs_april_same_peak": (most, april),
        "equal_lengths_april_vs_sync": (april_equal, sync_equal_lengths),
    }
    rows = {
        **{name: (results.gain(*pair), "fraction") for name, pair in gains.items()},
        **{f"{name}_rollout_time": (results.gain_in_rollout(*pair), "fraction") for name, pair in gains.items()},
        **{name: ([gain + 1 for gain in results.gain(*pair)], "ratio") for name, pair in ratios.items()},
        **{
            f"{name}_rollout_time": ([gain + 1 for gain in results.gain_in_rollout(*pair)], "ratio")
            for name, pair in ratios.items()
        },
        "no_barrier_gain_simulated_equal_concurrency": (
            [a.limit / b.consumed_per_s - 1 for a, b in zip(in_flight_512, results.of(sync_equal), strict=True)],
            "fraction"),
        "no_barrier_gain_simulated_equal_concurrency_rollout_time": (
            [a.limit / b.measures.consumed_per_rollout_s - 1
             for a, b in zip(in_flight_512, results.of(sync_equal), strict=True)], "fraction"),
        "mean_staleness_512": ([one.measures.staleness_mean for one in in_flight_512], "steps"),
        "mean_staleness_512_limit": ([one.limit_share for one in in_flight_512], "fraction"),
        **{f"best_vs_april_same_staleness{name}": (ratios, "ratio") for name, ratios in same_staleness.items()},
        "continuous_limit_simulated": ([one.limit_share for one in in_flight_256], "fraction"),
        "continuous_limit_simulated_512": ([one.cap_share for one in in_flight_512], "fraction"),
        "prefix_reused_share": ([one.measures.reused_share for one in results.of(overlap)], "fraction"),
        "idle_slot_share_total": ([1 - one.measures.occupancy for one in in_flight_512], "fraction"),
        **{
            f"idle_slot_share_{cause}": ([one.measures.idle_share[cause] for one in in_flight_512], "fraction")
            for cause in ("admission", "barrier", "update", "kv")
        },
        "idle_slot_share": ([one.measures.idle_share["pipeline"] for one in in_flight_512], "fraction"),
        **{
            f"length_first_steps_{kind}": (
                [a.measures.mean_length / b.measures.mean_length
                 for a, b in zip(results.of(one), results.of(first[0]), strict=True)], "ratio")
            for kind, one in (("april", first[1]), ("continuous", first[2]))
        },
    }  # fmt: skip
    windows = {
        f"length_window_{name}_{kind}": [
            window_ratios(a, b, statistic) for a, b in zip(results.of(one), results.of(settled[0]), strict=True)
        ]
        for kind, one in (("april", settled[1]), ("continuous", settled[2]))
        for name, statistic in (("mean", np.mean), ("p95", p95))
    }
    learner_shares = [
        one.measures.learner_share for kind in (sync, sync_equal, april, most) for one in results.of(kind)
    ]
    return [
        *(Row(name + suffix, values, unit) for name, (values, unit) in rows.items()),
        *(Row(name + suffix, values, "ratio", of=farthest_from_one) for name, values in windows.items()),
        Row("learner_share_max" + suffix, learner_shares, "fraction", of=max),
    ]


def extreme_rows(results: Results, base: Scenario) -> list[Row]:
    """A few responses hundreds of times as long as the others."""
    most = with_schedule(base, "continuous", in_flight=512)
    extremes = {"": most.with_keys(**BIMODAL), "_pareto": most.with_keys(**PARETO)}
    loose = {name: one.with_keys(**LOOSE) for name, one in extremes.items()}
    for scenario in (*extremes.values(), *loose.values()):
        results.start(scenario)
    shares = {f"extreme_cap_share{name}": [one.cap_share for one in results.of(extremes[name])] for name in extremes}
    shares |= {f"extreme_limit_share{name}": [one.limit_share for one in results.of(loose[name])] for name in loose}
    oldest = {f"extreme_staleness_max{name}": [one.measures.staleness_max for one in results.of(extremes[name])]
              for name in extremes}  # fmt: skip
    return [
        *(Row(name, values, "fraction") for name, values in shares.items()),
        *(Row(name, values, "steps", of=max) for name, values in oldest.items()),
    ]


def alarm_rows(pool: ProcessPoolExecutor, base: Scenario, seeds: range) -> list[Row]:
    """In how many seeds the alarm against length bias is raised at any step behind the warm-up."""
    n = base.schedule.n_samples_per_prompt
    kinds = {
        "sync": with_schedule(base, "sync"),
        "april": with_schedule(base, "april", over_sampling_batch_size=64),
        "overlap": with_schedule(base, "april", over_sampling_batch_size=64, overlap=True),
        "continuous": with_schedule(base, "continuous", in_flight=64 * n),
        "dropped": with_schedule(base, "april", over_sampling_batch_size=64, partial_rollout=False),
    }
    found = {kind: [pool.submit(alarmed, one.with_keys(seed=seed)) for seed in seeds] for kind, one in kinds.items()}
    return [
        Row(f"length_alarms_{kind}", [one.result() for one in waiting], "seeds", of=sum)
        for kind, waiting in found.items()
    ]


def alarmed(scenario: Scenario) -> bool:
    """Whether the alarm is raised at any step of the run, as a broker looks at it at each."""
    pipeline, verdicts = Pipeline(scenario), []
    note = pipeline.measures.trained

    def trained(step: int, groups: list) -> None:
        note(step, groups)
        verdicts.append(drift_of(pipeline.ledger.cohorts))

    pipeline.measures.trained = trained
    pipeline.run()
    looked_at = [verdict.alarm for verdict in verdicts if verdict]
    assert len(looked_at) > scenario.steps // 2, "the windows were full for most of the run"
    return any(looked_at)


def simulate_published(options) -> tuple[list[Row], dict]:
    """Print each cost model's table for the first seed; the rows, and the lines of the tables for all seeds."""
    parts = [options.part] if options.part else [*COSTS, *BESIDE_COSTS]
    seeds, steps = (range(1), WINDOW_STEPS) if options.quick else (range(options.seeds), 60)
    rows, tables = [], {}
    with ProcessPoolExecutor(options.processes) as pool:
        results = Results(pool, seeds)
        for part in parts:
            base = load_scenario(PUBLISHED, [("steps", steps)], None if part in BESIDE_COSTS else part)
            if part == "extreme":
                rows += extreme_rows(results, base)
                continue
            if part == "migration":
                for cost in MIGRATED:
                    on = load_scenario(PUBLISHED, [("steps", steps)], cost)
                    rows += migration.simulated_rows(pool, on, seeds, "" if cost == COSTS[0] else f"_{cost}")
                continue
            if part == "alarms":
                rows += alarm_rows(pool, base, range(1 if options.quick else ALARM_SEEDS))
                continue
            outcomes = [(name, results.start(scenario)) for name, scenario in variants(base)[0].items()]
            tables[part] = [
                [
                    dict(zip(COLUMNS, [name, *columns(found[seed].result())[1:]], strict=True))
                    for name, found in outcomes
                ]
                for seed in seeds
            ]
            lines = [list(line.values()) for line in tables[part][0]]
            print(f"cost model {part}: {base.cost.source}\n{table(lines, COLUMNS)}\n", flush=True)
            rows += simulated_rows(results, base, "" if part == COSTS[0] else f"_{part}")
    return rows, tables


def main() -> int:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--simulated", action="store_true", help="the published setting on a virtual clock")
    arguments.add_argument("--engine", choices=("torch", "sglang"), help="the schedules on this engine")
    arguments.add_argument("--trains", action="store_true", help="on an engine: with a learner that trains")
    arguments.add_argument("--only", nargs="+", default=[], metavar="NAME", help="on an engine: these schedules")
    arguments.add_argument("--steps", type=int, help="measured batches of a turn on an engine [default 24, SGLang 12]")
    arguments.add_argument("--processes", type=int, default=2, help="simulations at a time [default 2]")
    arguments.add_argument(
        "--part",
        help="a cost model's rows alone, or those of extreme lengths (extreme), of alarms, of migration; torch "
        "has the last alone [default all]",
    )
    arguments.add_argument("--seeds", type=int, help="of lengths; a row's n [default 3, torch 2, SGLang 1]")
    options = arguments.parse_args()
    if options.simulated == bool(options.engine):
        arguments.error("say --simulated, or an --engine")
    if options.engine and options.part not in (None, "migration" if options.engine == "torch" else None):
        arguments.error("--part is of --simulated; on the torch engine migration alone is one")
    if options.part and options.part not in (known := [*COSTS, *BESIDE_COSTS]):
        arguments.error(f"--part {options.part} is none of the parts; give one of {', '.join(known)}")
    if options.simulated and (options.trains or options.steps or options.only):
        arguments.error("--trains, --steps and --only are of an --engine")
    usual_seeds, usual_steps = (3, 24) if options.simulated else (2, 24) if options.engine == "torch" else (1, 12)
    options.seeds, options.steps = options.seeds or usual_seeds, options.steps or usual_steps
    seeds, measured = (range(1), 2) if options.quick else (range(options.seeds), options.steps)
    if options.simulated:
        rows, tables = simulate_published(options)
    elif options.part:
        import migration_real

        rows, tables = migration_real.measure(seeds, measured)
    else:
        import rollout_real

        rows, tables = rollout_real.measure(options.engine, seeds, measured, options.trains, options.only)
    report(rows, options.json, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
