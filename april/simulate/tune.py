"""`april tune`: the smallest N', or number of samples in flight, whose throughput is close to the best."""

from dataclasses import dataclass

from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Dial
from april.errors import refuse
from april.simulate.scenario import Scenario
from april.simulate.variants import SimulationResult, evaluate, table, with_dial

FACTORS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Tried values of N' / N, or of samples in flight / (N * n); the latter also below 1 and with all slots."""
FEWER_IN_FLIGHT = (0.25, 0.5, 0.75, 1.0)
WITHIN = 0.02
"""A value is as good as the best if its throughput is at most this share lower."""

HEADER = ("", "consumed/s", "of best", "stale mean", "max", "KV peak", "buffer peak", "")


@dataclass(frozen=True)
class TuningChoice:
    key: str
    """Configuration key of the dial, such as `schedule.in_flight`."""
    value: int
    why: str
    """Sentence part with the throughput, its share of the best and the staleness."""
    table: str
    """All tried values with their measures."""


def tune(scenario: Scenario, most_staleness: float | None = None) -> TuningChoice:
    """Choose the dial of the scenario's schedule. `most_staleness`: highest mean staleness of the trained tokens
    (steps); None: bounded only by `schedule.max_staleness`. Raises ConfigError if the schedule has no dial or no value
    is permitted."""
    if scenario.kind.dial is None:
        refuse(
            "schedule.kind",
            scenario.schedule.kind,
            "has nothing to tune",
            f"use {SCHEDULES.names_where(lambda kind: kind.dial)}",
        )
    key, results = candidates(scenario, scenario.kind.dial)
    permitted = [
        result for result in results if most_staleness is None or result.measures.staleness_mean <= most_staleness
    ]
    if not permitted:
        least = min(results, key=lambda result: result.measures.staleness_mean)
        refuse(
            "--mean-staleness",
            most_staleness,
            f"is below what any {key} reaches",
            f"the least is {least.measures.staleness_mean:.2f}, at {least.name}",
        )
    best = max(permitted, key=lambda result: result.consumed_per_s)
    chosen = next(result for result in permitted if result.consumed_per_s >= (1 - WITHIN) * best.consumed_per_s)
    lines = [
        [
            result.name, f"{result.consumed_per_s:,.0f}", f"{result.consumed_per_s / best.consumed_per_s:.3f}",
            f"{result.measures.staleness_mean:.2f}", str(result.measures.staleness_max),
            f"{result.measures.kv_peak_share:.0%}", f"{result.measures.buffer_peak_tokens / 1e6:.2f} M",
            "too stale" if result not in permitted else "chosen" if result is chosen else "",
        ]
        for result in results
    ]  # fmt: skip
    bound = "" if most_staleness is None else f" of those with a mean staleness of at most {most_staleness:g}"
    why = (
        f"the smallest{bound} within {WITHIN:.0%} of the best ({best.name}: {best.consumed_per_s:,.0f} tokens/s); "
        f"it consumes {chosen.consumed_per_s:,.0f} tokens/s at a mean staleness of {chosen.measures.staleness_mean:.2f}"
        f", {chosen.limit_share:.0%} of what its engines generate without any barrier"
    )
    return TuningChoice(key, int(chosen.name), why, table(lines, (key, *HEADER[1:])))


def candidates(scenario: Scenario, dial: Dial) -> tuple[str, list[SimulationResult]]:
    """(key, results of its values in ascending order). If the staleness bound admits no N' above N, N is the only
    value."""
    schedule = scenario.schedule
    unit = dial.one_batch_value(schedule)
    most = schedule.batches_in_reach * unit
    if dial.counts_samples:
        most = min(most, scenario.engines.count * scenario.engines.slots)
        tried = {most, *(round(factor * unit) for factor in (*FEWER_IN_FLIGHT, *FACTORS))}
        values = sorted(value for value in tried if 1 <= value <= most)
    else:
        tried = {round(factor * unit) for factor in FACTORS}
        values = sorted(value for value in tried if unit < value <= most) or [unit]
    results = [evaluate(str(value), with_dial(scenario, schedule.kind, value)) for value in values]
    return f"schedule.{dial.key}", results
