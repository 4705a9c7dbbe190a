"""Rollout throughput by schedule, in consumed tokens/s: the published setting on a virtual clock.

Rows depend on the scenario and the seed alone, not on the machine. Without a suffix they are those of the
scenario's first cost model; the others have its name as a suffix.
"""

import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from common import ROOT, Row, parser, ratios, report

from april.broker.telemetry.lengths import drift_of
from april.simulate.pipeline import Pipeline
from april.simulate.scenario import Scenario, load_scenario
from april.simulate.variants import COMPARED, SimulationResult, columns, evaluate, text_table, variants, with_schedule

PUBLISHED = ROOT / "configs/published.toml"
COSTS = ("h100", "mi300x", "plain")
OTHER_PARTS = ("extreme", "alarms")
"""Parts that are not a cost model's."""
OVER_SAMPLED = (1.5, 2, 3)
"""N' over N in the comparison at equal staleness."""
IN_FLIGHT = (96, 128, 192, 256, 320, 384, 448, 512)
"""Samples in flight of `continuous`, from which the best at a staleness is chosen."""
OVERLAPPED = (42, 44, 45, 46, 56, 60, 64, 80)
"""N' of `april` with overlap, from which it is chosen as well."""
LOOSE = {"schedule__max_staleness": 240, "warmup_steps": 350, "steps": 250, "limit_responses": 100_000}
"""A bound so large that the cap is 1 for extreme lengths, and a run that is long against the longest of them."""
BIMODAL = {"lengths__family": "bimodal", "lengths__longest_tokens": 50_000}
"""1 % of the responses have 50,000 tokens, the rest 100."""
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
            self._waiting[key] = [self.pool.submit(evaluate, "", each) for each in seeded]
        return self._waiting[key]

    def of(self, scenario: Scenario) -> list[SimulationResult]:
        return [waiting.result() for waiting in self.start(scenario)]

    def ratios(self, ours: Scenario, theirs: Scenario, measure: str = "consumed_per_s") -> list[float]:
        """Ours over theirs, seed by seed."""
        sides = [[getattr(result.measures, measure) for result in self.of(side)] for side in (ours, theirs)]
        return ratios(*sides)


def best_at_same_staleness(results: Results, april: Scenario, others: list[Scenario], speed: str) -> list[float]:
    """The `speed` of the best of `others` with no higher mean staleness, over that of `april`; seed by seed."""
    found = []
    for index, reached in enumerate(results.of(april)):
        candidates = [results.of(other)[index].measures for other in others]
        fresh = [each for each in candidates if each.staleness_mean <= reached.measures.staleness_mean]
        found.append(max(getattr(each, speed) for each in fresh) / getattr(reached.measures, speed))
    return found


WINDOW_STEPS = 20
"""Batches of a window in which trained lengths are compared with those of `sync`."""


def window_ratios(ours: SimulationResult, sync: SimulationResult, statistic) -> float:
    """Trained lengths in a window over those that `sync` trains in it: of all windows the ratio farthest from 1."""
    found = []
    for start in range(0, len(sync.measures.steps) - WINDOW_STEPS + 1, WINDOW_STEPS):
        mine, theirs = (
            np.concatenate([step.lengths for step in run.measures.steps[start : start + WINDOW_STEPS]])
            for run in (ours, sync)
        )
        found.append(statistic(mine) / statistic(theirs))
    return farthest_from_one(found)


def farthest_from_one(ratios: list[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def p95(lengths: np.ndarray) -> float:
    return float(np.percentile(lengths, 95))


def simulated_rows(results: Results, base: Scenario, suffix: str) -> list[Row]:
    """The rows of one cost model."""
    sync = with_schedule(base, "sync")
    sync_equal = with_schedule(base, "sync", rollout_batch_size=64)
    april = with_schedule(base, "april", over_sampling_batch_size=64)
    continuous = {count: with_schedule(base, "continuous", in_flight=count) for count in IN_FLIGHT}
    most = continuous[512]
    recomputed = most.with_keys(weights__keep_kv=False)
    aprils = [with_schedule(base, "april", over_sampling_batch_size=round(32 * factor)) for factor in OVER_SAMPLED]
    overlaps = {
        groups: with_schedule(base, "april", over_sampling_batch_size=groups, overlap=True) for groups in OVERLAPPED
    }
    april_even, sync_even = (each.with_keys(lengths__family="equal") for each in (april, sync_equal))
    settling_steps = base.schedule.max_staleness + 1
    first = [each.with_keys(warmup_steps=0, steps=settling_steps) for each in (sync, april, most)]
    settled = [each.with_keys(warmup_steps=settling_steps) for each in (sync, april, most)]
    others = [*continuous.values(), *overlaps.values()]
    for scenario in (*first, *settled, sync, sync_equal, april, recomputed, *aprils, *others, april_even, sync_even):
        results.start(scenario)

    rows: dict[str, tuple[list[float], str]] = {}
    for time, speed in (("", "consumed_per_s"), ("_rollout_time", "consumed_per_rollout_s")):
        for name, pair in {
            "april_gain_simulated": (april, sync),
            "april_gain_simulated_equal_concurrency": (april, sync_equal),
            "continuous_gain_simulated_equal_concurrency": (most, sync_equal),
            "continuous_gain_simulated_reprefill": (recomputed, sync_equal),
        }.items():
            rows[name + time] = [ratio - 1 for ratio in results.ratios(*pair, speed)], "fraction"
        rows[f"continuous_vs_april_same_peak{time}"] = results.ratios(most, april, speed), "ratio"
        rows[f"equal_lengths_april_vs_sync{time}"] = results.ratios(april_even, sync_even, speed), "ratio"
        limits, speeds = [run.limit for run in results.of(most)], results.of(sync_equal)
        gains = [ratio - 1 for ratio in ratios(limits, (getattr(run.measures, speed) for run in speeds))]
        rows[f"no_barrier_gain_simulated_equal_concurrency{time}"] = gains, "fraction"
        found = [best_at_same_staleness(results, each, others, speed) for each in aprils]
        rows[f"best_vs_april_same_staleness{time}"] = [min(seed) for seed in zip(*found, strict=True)], "ratio"
        for factor, best in zip(OVER_SAMPLED, found, strict=True):
            rows[f"best_vs_april_same_staleness_{factor:g}N{time}"] = best, "ratio"
    wide = results.of(most)
    rows["mean_staleness_512"] = [run.measures.staleness_mean for run in wide], "steps"
    rows["mean_staleness_512_limit"] = [run.limit_share for run in wide], "fraction"
    rows["continuous_limit_simulated"] = [run.limit_share for run in results.of(continuous[256])], "fraction"
    rows["continuous_limit_simulated_512"] = [run.cap_share for run in wide], "fraction"
    rows["prefix_reused_share"] = [run.measures.reused_share for run in results.of(overlaps[64])], "fraction"
    rows["idle_slot_share_total"] = [1 - run.measures.occupancy for run in wide], "fraction"
    for cause in ("admission", "barrier", "update", "kv", "pipeline"):
        name = "idle_slot_share" if cause == "pipeline" else f"idle_slot_share_{cause}"
        rows[name] = [run.measures.idle_share[cause] for run in wide], "fraction"
    for kind, scenario in (("april", first[1]), ("continuous", first[2])):
        rows[f"length_first_steps_{kind}"] = results.ratios(scenario, first[0], "mean_length"), "ratio"
    found = [Row(name + suffix, *values) for name, values in rows.items()]
    for kind, scenario in (("april", settled[1]), ("continuous", settled[2])):
        for name, statistic in (("mean", np.mean), ("p95", p95)):
            pairs = zip(results.of(scenario), results.of(settled[0]), strict=True)
            farthest = [window_ratios(*pair, statistic) for pair in pairs]
            found.append(Row(f"length_window_{name}_{kind}{suffix}", farthest, "ratio", of=farthest_from_one))
    shares = [run.measures.learner_share for kind in (sync, sync_equal, april, most) for run in results.of(kind)]
    return [*found, Row("learner_share_max" + suffix, shares, "fraction", of=max)]


def extreme_rows(results: Results, base: Scenario) -> list[Row]:
    """A few responses hundreds of times as long as the others."""
    most = with_schedule(base, "continuous", in_flight=512)
    extremes = {"": most.with_keys(**BIMODAL), "_pareto": most.with_keys(**PARETO)}
    loose = {name: scenario.with_keys(**LOOSE) for name, scenario in extremes.items()}
    for scenario in (*extremes.values(), *loose.values()):
        results.start(scenario)
    rows = []
    for name in extremes:
        capped, free = results.of(extremes[name]), results.of(loose[name])
        oldest = [run.measures.staleness_max for run in capped]
        rows += [
            Row(f"extreme_cap_share{name}", [run.cap_share for run in capped], "fraction"),
            Row(f"extreme_limit_share{name}", [run.limit_share for run in free], "fraction"),
            Row(f"extreme_staleness_max{name}", oldest, "steps", of=max),
        ]
    return rows


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
    found = {
        kind: [pool.submit(alarmed, scenario.with_keys(seed=seed)) for seed in seeds]
        for kind, scenario in kinds.items()
    }
    return [
        Row(f"length_alarms_{kind}", [raised.result() for raised in waiting], "seeds", of=sum)
        for kind, waiting in found.items()
    ]


def alarmed(scenario: Scenario) -> bool:
    """Whether the alarm is raised at any step of the run, as a broker looks at it at each."""
    pipeline, verdicts = Pipeline(scenario), []
    note = pipeline.measures.record_step

    def trained(step: int, groups: list) -> None:
        note(step, groups)
        verdicts.append(drift_of(pipeline.ledger.cohorts))

    pipeline.measures.record_step = trained
    pipeline.run()
    looked_at = [verdict.alarm for verdict in verdicts if verdict]
    assert len(looked_at) > scenario.steps // 2, "the windows were full for most of the run"
    return any(looked_at)


def simulate_published(options) -> tuple[list[Row], dict]:
    """Print each cost model's table for the first seed; the rows, and the lines of the tables for all seeds."""
    parts = [options.part] if options.part else [*COSTS, *OTHER_PARTS]
    seeds, steps = (range(1), WINDOW_STEPS) if options.quick else (range(options.seeds), 60)
    rows, tables = [], {}
    with ProcessPoolExecutor(options.processes) as pool:
        results = Results(pool, seeds)
        for part in parts:
            base = load_scenario(PUBLISHED, [("steps", steps)], None if part in OTHER_PARTS else part)
            if part == "extreme":
                rows += extreme_rows(results, base)
                continue
            if part == "alarms":
                rows += alarm_rows(pool, base, range(1 if options.quick else ALARM_SEEDS))
                continue
            outcomes = [(name, results.start(scenario)) for name, scenario in variants(base)[0].items()]
            tables[part] = [
                [
                    dict(zip(COMPARED, [name, *columns(found[seed].result())[1:]], strict=True))
                    for name, found in outcomes
                ]
                for seed in seeds
            ]
            lines = [list(line.values()) for line in tables[part][0]]
            print(f"cost model {part}: {base.cost.source}\n{text_table(lines)}\n", flush=True)
            rows += simulated_rows(results, base, "" if part == COSTS[0] else f"_{part}")
    return rows, tables


def main() -> int:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--processes", type=int, default=2, help="simulations at a time [default 2]")
    arguments.add_argument(
        "--part", help="a cost model's rows alone, or those of extreme lengths (extreme), of alarms [default all]"
    )
    arguments.add_argument("--seeds", type=int, default=3, help="of lengths; a row's n [default 3]")
    options = arguments.parse_args()
    if options.part and options.part not in (known := [*COSTS, *OTHER_PARTS]):
        arguments.error(f"--part {options.part} is none of the parts; give one of {', '.join(known)}")
    rows, tables = simulate_published(options)
    report(rows, options.json, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
