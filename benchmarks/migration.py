"""What `schedule.migrate` brings: a batch's time without it over that with it, less 1."""

from concurrent.futures import ProcessPoolExecutor

from common import Row

from april.simulate.pipeline import simulate
from april.simulate.scenario import Scenario
from april.simulate.variants import with_schedule

UNEVEN = 0.3
"""the slowest engine takes so much more than the mean, the fastest so much less"""


def kinds(base: Scenario) -> dict[str, Scenario]:
    """By what their rows are called behind `migration_gain`."""
    section = base.schedule
    return {
        "": with_schedule(base, "sync"),
        "_april": with_schedule(base, "april", over_sampling_batch_size=section.over_sampled),
        "_continuous": with_schedule(base, "continuous", in_flight=section.over_sampled * section.n_samples_per_prompt),
    }


def simulated_rows(pool: ProcessPoolExecutor, base: Scenario, seeds: range, suffix: str) -> list[Row]:
    """Of one cost model; with equal engines, and with uneven ones."""
    scenarios = {
        f"{name}{speeds}{suffix}": one
        for speeds, spread in (("", 0.0), ("_uneven", UNEVEN))
        for name, one in kinds(base.with_keys(engines__speed_spread=spread)).items()
    }
    return rows_of(pool, scenarios, seeds)


def rows_of(pool: ProcessPoolExecutor, scenarios: dict[str, Scenario], seeds: range) -> list[Row]:
    found = {
        name: [
            [pool.submit(batch_s, one.with_keys(seed=seed, schedule__migrate=migrate)) for migrate in (False, True)]
            for seed in seeds
        ]
        for name, one in scenarios.items()
    }
    return [
        Row(
            f"migration_gain{name}", [without.result() / with_it.result() - 1 for without, with_it in pairs], "fraction"
        )
        for name, pairs in found.items()
    ]


def batch_s(scenario: Scenario) -> float:
    """Mean time of a batch."""
    measures = simulate(scenario)
    return measures.measured.time_s / len(measures.steps)
