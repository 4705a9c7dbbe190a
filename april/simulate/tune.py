"""Which N', or how many samples in flight: the smallest that comes near the best under a bound on mean staleness."""

from dataclasses import dataclass

from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Dial
from april.config import ConfigError
from april.simulate.scenario import Scenario
from april.simulate.variants import Outcome, evaluate, table, turned

FACTORS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""N' over N, or samples in flight over N * n, that are tried; the latter also below 1, and all slots"""
FEWER_IN_FLIGHT = (0.25, 0.5, 0.75, 1.0)
WITHIN = 0.02
"""a choice is as good as the best if it consumes at most this share less"""

HEADER = ("", "consumed/s", "of best", "stale mean", "max", "KV peak", "buffer peak", "")


@dataclass(frozen=True)
class Choice:
    key: str
    value: int
    why: str
    table: str


def tune(scenario: Scenario, most_staleness: float | None = None) -> Choice:
    """For the scenario's kind of schedule. `most_staleness`: of the mean over trained tokens (steps); none: only the
    scenario's `max_staleness` bounds it."""
    if scenario.kind.dial is None:
        raise ConfigError(
            f"key 'schedule.kind' = {scenario.schedule.kind!r} has nothing to tune; use "
            f"{SCHEDULES.those(lambda kind: kind.dial)}"
        )
    key, outcomes = candidates(scenario, scenario.kind.dial)
    permitted = [one for one in outcomes if most_staleness is None or one.measures.staleness_mean <= most_staleness]
    if not permitted:
        least = min(outcomes, key=lambda one: one.measures.staleness_mean)
        raise ConfigError(
            f"option '--mean-staleness' = {most_staleness:g} is below what any {key} reaches; the least is "
            f"{least.measures.staleness_mean:.2f}, at {least.name}"
        )
    best = max(permitted, key=lambda one: one.consumed_per_s)
    chosen = next(one for one in permitted if one.consumed_per_s >= (1 - WITHIN) * best.consumed_per_s)
    lines = [
        [
            one.name, f"{one.consumed_per_s:,.0f}", f"{one.consumed_per_s / best.consumed_per_s:.3f}",
            f"{one.measures.staleness_mean:.2f}", str(one.measures.staleness_max), f"{one.measures.kv_peak_share:.0%}",
            f"{one.measures.buffer_peak_tokens / 1e6:.2f} M",
            "too stale" if one not in permitted else "chosen" if one is chosen else "",
        ]
        for one in outcomes
    ]  # fmt: skip
    bound = "" if most_staleness is None else f" of those with a mean staleness of at most {most_staleness:g}"
    why = (
        f"the smallest{bound} within {WITHIN:.0%} of the best ({best.name}: {best.consumed_per_s:,.0f} tokens/s); "
        f"it consumes {chosen.consumed_per_s:,.0f} tokens/s at a mean staleness of {chosen.measures.staleness_mean:.2f}"
        f", {chosen.limit_share:.0%} of what its engines generate without any barrier"
    )
    return Choice(key, int(chosen.name), why, table(lines, (key, *HEADER[1:])))


def candidates(scenario: Scenario, dial: Dial) -> tuple[str, list[Outcome]]:
    """(the key, what its values give, the smallest first). Where the bound admits nothing above N, N' is N."""
    schedule = scenario.schedule
    unit = dial.of_one_batch(schedule)
    most = schedule.batches_in_reach * unit
    if dial.counts_samples:
        most = min(most, scenario.engines.count * scenario.engines.slots)
        wanted = {most, *(round(factor * unit) for factor in (*FEWER_IN_FLIGHT, *FACTORS))}
        values = sorted(value for value in wanted if 1 <= value <= most)
    else:
        wanted = {round(factor * unit) for factor in FACTORS}
        values = sorted(value for value in wanted if unit < value <= most) or [unit]
    outcomes = [evaluate(str(value), turned(scenario, schedule.kind, value)) for value in values]
    return f"schedule.{dial.key}", outcomes
