"""The planning questions: one key of the schedule or the hardware at a time, everything else as the scenario says."""

from dataclasses import dataclass

from april.config import ConfigError
from april.simulate.scenario import Scenario
from april.simulate.variants import Outcome, evaluate, over_sampled, table, with_schedule

FACTORS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""N' over N, and samples in flight over N * n; the latter also below 1"""
FEWER_IN_FLIGHT = (0.25, 0.5, 1.0)
STALENESS = (1, 2, 3, 4, 5, 6, 8, 12)
ENGINES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""engines over those of the scenario, for the same learner"""

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


def sweeps(scenario: Scenario) -> list[Sweep]:
    """Over-sampling, samples in flight, staleness bound, engines for each learner. Raises ConfigError."""
    schedule = scenario.schedule
    groups, batch = schedule.rollout_batch_size, schedule.rollout_batch_size * schedule.n_samples_per_prompt
    reach = schedule.max_staleness + 1
    in_flight = schedule.in_flight or min(2, reach) * batch
    continuous = with_schedule(scenario, "continuous", in_flight=in_flight)
    counts = {in_flight, *(max(1, round(factor * batch)) for factor in (*FEWER_IN_FLIGHT, *FACTORS) if factor <= reach)}
    return [
        _sweep("april: over-sampling", "N' / N", [
            (factor, over_sampled(scenario, round(factor * groups))) for factor in admitted(scenario, FACTORS)
        ]),
        _sweep("continuous: samples in flight", "in flight", [
            (count, with_schedule(scenario, "continuous", in_flight=count)) for count in sorted(counts)
        ]),
        _sweep(f"continuous, {in_flight} in flight: staleness bound", "max_staleness", [
            (staleness, continuous.with_keys(schedule__max_staleness=staleness))
            for staleness in sorted({*STALENESS, schedule.max_staleness}) if in_flight <= (staleness + 1) * batch
        ]),
        _sweep(f"continuous, {in_flight} in flight: engines for the learner", "engines", [
            (count, continuous.with_keys(engines__count=count))
            for count in sorted({max(1, round(part * scenario.engines.count)) for part in ENGINES})
        ]),
    ]  # fmt: skip


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
