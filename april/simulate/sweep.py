"""The planning questions: one key of the schedule or the hardware at a time, everything else as the scenario says."""

from dataclasses import dataclass

from april.broker.schedules import SCHEDULES
from april.config import ConfigError
from april.simulate.scenario import Scenario
from april.simulate.variants import Outcome, counts_samples, dialled, evaluate, table, turned

FACTORS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""N' over N, and samples in flight over N * n; the latter also below 1"""
FEWER_IN_FLIGHT = (0.25, 0.5, 1.0)
STALENESS = (1, 2, 3, 4, 5, 6, 8, 12)
ENGINES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""engines over those of the scenario, for the same learner"""

UNITS = {True: "in flight", False: "groups in a round"}
"""what a dial counts, by whether that is samples"""

HEADER = (
    "", "consumed/s", "of limit", "stale mean", "max", "occupied", "KV peak", "retracted", "step p50 s", "learner busy",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    title: str
    axis: str
    """what changes, with its unit"""
    points: list[tuple[float, Outcome]]

    def table(self) -> str:
        return table([self._line(value, outcome) for value, outcome in self.points], (self.axis, *HEADER[1:]))

    def _line(self, value: float, outcome: Outcome) -> list[str]:
        m = outcome.measures
        return [
            f"{value:g}", f"{m.consumed_per_s:,.0f}", f"{outcome.limit_share:.3f}", f"{m.staleness_mean:.2f}",
            str(m.staleness_max), f"{m.occupancy:.1%}", f"{m.kv_peak_share:.0%}", str(m.measured.retractions),
            f"{m.step_s[0]:.1f}", f"{m.learner_share:.1%}",
        ]  # fmt: skip


def sweeps(scenario: Scenario, kind: str = "") -> list[Sweep]:
    """What each schedule starts at a time; then, for one that starts samples, staleness bound and engines for each
    learner. `kind`: of the only schedule; none: all that are shipped. Raises ConfigError."""
    kinds = [dialled(kind)] if kind else [name for name in SCHEDULES.shipped if SCHEDULES.find(name).dial]
    found = [dial_sweep(scenario, one) for one in kinds]
    flowing = kind or dialled("", counts_samples)
    dial, schedule = SCHEDULES.find(flowing).dial, scenario.schedule
    value, batch = value_of(scenario, flowing), dial.of_one_batch(schedule)
    named, base = f"{flowing}, {value} {UNITS[dial.counts_samples]}", turned(scenario, flowing, value)
    return [
        *found,
        _sweep(f"{named}: staleness bound", "max_staleness", [
            (staleness, base.with_keys(schedule__max_staleness=staleness))
            for staleness in sorted({*STALENESS, schedule.max_staleness})
            if value <= (staleness + batches_more(base)) * batch
        ]),
        _sweep(f"{named}: engines for the learner", "engines", [
            (count, base.with_keys(engines__count=count))
            for count in sorted({max(1, round(part * scenario.engines.count)) for part in ENGINES})
        ]),
    ]  # fmt: skip


def batches_more(scenario: Scenario) -> int:
    """Batches in reach beyond the staleness bound."""
    return scenario.schedule.batches_in_reach - scenario.schedule.max_staleness


def value_of(scenario: Scenario, kind: str) -> int:
    """Of a schedule's dial, as the scenario says, or what two batches take."""
    schedule, dial = scenario.schedule, SCHEDULES.find(kind).dial
    return getattr(schedule, dial.key) or min(2, schedule.max_staleness + 1) * dial.of_one_batch(schedule)


def dial_sweep(scenario: Scenario, kind: str) -> Sweep:
    schedule, dial = scenario.schedule, SCHEDULES.find(kind).dial
    batch = dial.of_one_batch(schedule)
    if not dial.counts_samples:
        return _sweep(f"{kind}: over-sampling", "N' / N", [
            (factor, turned(scenario, kind, round(factor * batch))) for factor in admitted(scenario, FACTORS)
        ])  # fmt: skip
    reach = schedule.max_staleness + 1
    more = (max(1, round(factor * batch)) for factor in (*FEWER_IN_FLIGHT, *FACTORS) if factor <= reach)
    counts = sorted({value_of(scenario, kind), *more})
    return _sweep(
        f"{kind}: samples in flight", UNITS[True], [(count, turned(scenario, kind, count)) for count in counts]
    )


def admitted(scenario: Scenario, factors: tuple[float, ...]) -> list[float]:
    """Those N' over N that the bound admits. Raises ConfigError if there are none."""
    schedule = scenario.schedule
    found = [factor for factor in factors if factor <= schedule.batches_in_reach]
    if not found:
        raise ConfigError(
            f"key 'schedule.max_staleness' = {schedule.max_staleness} admits no N' above N"
            f"{' with overlap' if schedule.overlap else ''}, which leaves nothing to sweep; raise it"
        )
    return found


def _sweep(title: str, axis: str, scenarios: list[tuple[float, Scenario]]) -> Sweep:
    return Sweep(title, axis, [(value, evaluate(f"{value:g}", scenario)) for value, scenario in scenarios])
