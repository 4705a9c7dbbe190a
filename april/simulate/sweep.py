"""Sweeps for planning: one key of the schedule or the hardware varies, the rest is as in the scenario."""

from dataclasses import dataclass

from april.broker.schedules import SCHEDULES
from april.errors import refuse
from april.simulate.scenario import Scenario
from april.simulate.variants import SimulationResult, counts_samples, evaluate, kind_with_dial, table, with_dial

FACTORS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Swept values of N' / N and of samples in flight / (N * n); the latter also below 1."""
FEWER_IN_FLIGHT = (0.25, 0.5, 1.0)
STALENESS = (1, 2, 3, 4, 5, 6, 8, 12)
ENGINES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Swept numbers of engines, relative to the scenario's."""

UNITS = {True: "in flight", False: "groups in a round"}
"""Unit of a dial, by whether it counts samples."""

HEADER = (
    "", "consumed/s", "of limit", "stale mean", "max", "occupied", "KV peak", "retracted", "step p50 s", "learner busy",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    title: str
    axis: str
    """Name of the swept quantity, with its unit."""
    points: list[tuple[float, SimulationResult]]

    def table(self) -> str:
        return table([self._cells(value, outcome) for value, outcome in self.points], (self.axis, *HEADER[1:]))

    def _cells(self, value: float, outcome: SimulationResult) -> list[str]:
        m = outcome.measures
        return [
            f"{value:g}", f"{m.consumed_per_s:,.0f}", f"{outcome.limit_share:.3f}", f"{m.staleness_mean:.2f}",
            str(m.staleness_max), f"{m.occupancy:.1%}", f"{m.kv_peak_share:.0%}", str(m.measured.retractions),
            f"{m.step_s[0]:.1f}", f"{m.learner_share:.1%}",
        ]  # fmt: skip


def sweeps(scenario: Scenario, kind: str = "") -> list[Sweep]:
    """One sweep over each schedule's dial, then the staleness bound and the number of engines for one schedule.

    `kind`: the only schedule swept; empty: all shipped ones, and the last two for one that counts samples. Raises
    ConfigError.
    """
    kinds = [kind_with_dial(kind)] if kind else [name for name in SCHEDULES.shipped if SCHEDULES.find(name).dial]
    found = [dial_sweep(scenario, name) for name in kinds]
    swept = kind or kind_with_dial("", counts_samples)
    dial, schedule = SCHEDULES.find(swept).dial, scenario.schedule
    value, batch = dial_value(scenario, swept), dial.one_batch_value(schedule)
    named, base = f"{swept}, {value} {UNITS[dial.counts_samples]}", with_dial(scenario, swept, value)
    return [
        *found,
        _sweep(f"{named}: staleness bound", "max_staleness", [
            (staleness, base.with_keys(schedule__max_staleness=staleness))
            for staleness in sorted({*STALENESS, schedule.max_staleness})
            if value <= (staleness + batches_ahead(base)) * batch
        ]),
        _sweep(f"{named}: engines for the learner", "engines", [
            (count, base.with_keys(engines__count=count))
            for count in sorted({max(1, round(part * scenario.engines.count)) for part in ENGINES})
        ]),
    ]  # fmt: skip


def batches_ahead(scenario: Scenario) -> int:
    """Batches that the schedule may start ahead beyond `max_staleness`."""
    return scenario.schedule.batches_in_reach - scenario.schedule.max_staleness


def dial_value(scenario: Scenario, kind: str) -> int:
    """The schedule's dial as set in the scenario, or the value for two batches."""
    schedule, dial = scenario.schedule, SCHEDULES.find(kind).dial
    return getattr(schedule, dial.key) or min(2, schedule.max_staleness + 1) * dial.one_batch_value(schedule)


def dial_sweep(scenario: Scenario, kind: str) -> Sweep:
    schedule, dial = scenario.schedule, SCHEDULES.find(kind).dial
    batch = dial.one_batch_value(schedule)
    if not dial.counts_samples:
        return _sweep(f"{kind}: over-sampling", "N' / N", [
            (factor, with_dial(scenario, kind, round(factor * batch))) for factor in admitted(scenario, FACTORS)
        ])  # fmt: skip
    reach = schedule.max_staleness + 1
    more = (max(1, round(factor * batch)) for factor in (*FEWER_IN_FLIGHT, *FACTORS) if factor <= reach)
    counts = sorted({dial_value(scenario, kind), *more})
    return _sweep(
        f"{kind}: samples in flight", UNITS[True], [(count, with_dial(scenario, kind, count)) for count in counts]
    )


def admitted(scenario: Scenario, factors: tuple[float, ...]) -> list[float]:
    """The values of N' / N that the staleness bound admits. Raises ConfigError if there are none."""
    schedule = scenario.schedule
    found = [factor for factor in factors if factor <= schedule.batches_in_reach]
    if not found:
        refuse(
            "schedule.max_staleness",
            schedule.max_staleness,
            f"admits no N' above N{' with overlap' if schedule.overlap else ''}, which leaves nothing to sweep",
            "raise it",
        )
    return found


def _sweep(title: str, axis: str, scenarios: list[tuple[float, Scenario]]) -> Sweep:
    return Sweep(title, axis, [(value, evaluate(f"{value:g}", scenario)) for value, scenario in scenarios])
