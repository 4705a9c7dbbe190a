"""The schedules that are compared on one scenario: the baseline, the published method, its variants, `continuous`."""

from dataclasses import dataclass

from april.config import ConfigError
from april.simulate.limit import no_barrier_limit
from april.simulate.measures import Measures
from april.simulate.pipeline import simulate
from april.simulate.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """A variant, what it gave, and what it could have given."""

    name: str
    scenario: Scenario
    measures: Measures
    limit: float
    """tokens/s of its engines with its samples in flight and no barrier"""
    cap: float
    """share of the limit that bound or barrier leave it"""

    @property
    def consumed_per_s(self) -> float:
        return self.measures.consumed_per_s

    @property
    def limit_share(self) -> float:
        return self.consumed_per_s / self.limit

    @property
    def cap_share(self) -> float:
        return self.limit_share / self.cap


def evaluate(name: str, scenario: Scenario) -> Outcome:
    return Outcome(
        name, scenario, simulate(scenario), no_barrier_limit(scenario), scenario.cap(scenario.make_lengths())
    )


def variants(scenario: Scenario) -> tuple[dict[str, Scenario], dict[str, ConfigError]]:
    """(those that the bound admits, why it refuses the others). `scenario` gives N, n, N' (2 N if it has none), S,
    samples in flight beside those of N' and N, and everything that is not a schedule."""
    schedule = scenario.schedule
    groups, n = schedule.rollout_batch_size, schedule.n_samples_per_prompt
    over = schedule.groups_per_round if schedule.groups_per_round > groups else 2 * groups
    peak, april = over * n, {"kind": "april", "over_sampling_batch_size": over}
    recomputed = scenario.with_keys(weights__keep_kv=False)
    wanted = {
        f"sync, N = {groups}": (scenario, {"kind": "sync"}),
        f"sync, N = {over}": (scenario, {"kind": "sync", "rollout_batch_size": over}),
        f"april, N' = {over}": (scenario, april),
        f"april, N' = {over}, work dropped": (scenario, april | {"partial_rollout": False}),
        f"april, N' = {over}, overlap": (scenario, april | {"overlap": True}),
        **{
            f"continuous, {count} in flight": (scenario, {"kind": "continuous", "in_flight": count})
            for count in sorted({peak // 2, peak, schedule.in_flight or peak})
        },
        f"continuous, {peak}, cache recomputed": (recomputed, {"kind": "continuous", "in_flight": peak}),
    }
    admitted, refused = {}, {}
    for name, (base, keys) in wanted.items():
        try:
            admitted[name] = with_schedule(base, **keys)
        except ConfigError as error:
            refused[name] = error
    return admitted, refused


def over_sampled(scenario: Scenario, groups: int) -> Scenario:
    """`april` with so many groups in a round, overlapped and resumed as the scenario says."""
    schedule = scenario.schedule
    kept = {"overlap": schedule.overlap, "partial_rollout": schedule.partial_rollout}
    return with_schedule(scenario, "april", over_sampling_batch_size=groups, **kept)


def with_schedule(scenario: Scenario, kind: str, **keys) -> Scenario:
    """The scenario under another schedule; of the old one N, n and S are kept."""
    fresh = {"over_sampling_batch_size": None, "in_flight": None, "overlap": False, "partial_rollout": True}
    changes = fresh | {"kind": kind} | keys
    return scenario.with_keys(**{f"schedule__{key}": value for key, value in changes.items()})


COLUMNS = (
    "", "consumed/s", "in rollout", "generated/s", "gen. in rollout", "wasted", "recomputed", "occupied", "stale mean",
    "max", "off-policy", "step p50 s", "p95 s", "limit/s", "of limit", "cap", "of cap", "KV peak", "buffer peak",
)  # fmt: skip


def columns(outcome: Outcome) -> list[str]:
    """One line of the table under `COLUMNS`."""
    m = outcome.measures
    p50, p95 = m.step_s
    return [
        outcome.name, f"{m.consumed_per_s:,.0f}", f"{m.consumed_per_rollout_s:,.0f}", f"{m.generated_per_s:,.0f}",
        f"{m.generated_per_rollout_s:,.0f}", f"{m.wasted_share:.1%}", f"{m.recomputed_share:.1%}",
        f"{m.occupancy:.1%}", f"{m.staleness_mean:.2f}", str(m.staleness_max), f"{m.off_policy_share:.1%}",
        f"{p50:.1f}", f"{p95:.1f}", f"{outcome.limit:,.0f}", f"{outcome.limit_share:.3f}", f"{outcome.cap:.3f}",
        f"{outcome.cap_share:.3f}", f"{m.kv_peak_share:.0%}", f"{m.buffer_peak_tokens / 1e6:.2f} M",
    ]  # fmt: skip


def table(lines: list[list[str]], header: tuple[str, ...] = COLUMNS) -> str:
    """Columns aligned, the first to the left."""
    rows = [list(header), *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
