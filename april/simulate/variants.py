"""The schedules that are compared on one scenario; which lines there are of a schedule, it says itself."""

from collections.abc import Callable
from dataclasses import dataclass

from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Schedule
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


def variants(scenario: Scenario, kind: str = "") -> tuple[dict[str, Scenario], dict[str, ConfigError]]:
    """(those that the bound admits, why it refuses the others). `scenario` gives N, n, N' (2 N if it has none), S,
    samples in flight beside those of N' and N, and everything that is not a schedule.

    `kind`: the only one that is compared; none: all that are shipped, and the scenario's own.
    """
    kinds = [kind] if kind else list(dict.fromkeys([*SCHEDULES.shipped, scenario.schedule.kind]))
    admitted, refused = {}, {}
    for each in kinds:
        for line, keys in SCHEDULES.find(each).variants(scenario.schedule).items():
            name = f"{each}, {line}" if line else each
            try:
                admitted[name] = with_schedule(scenario, each, **keys)
            except ConfigError as error:
                refused[name] = error
    return admitted, refused


def turned(scenario: Scenario, kind: str, value: int) -> Scenario:
    """Under a kind of schedule with its dial at a value; overlapped and resumed as the scenario says, where that means
    something."""
    entry, schedule = SCHEDULES.find(kind), scenario.schedule
    kept = {key: getattr(schedule, key) for key in ("overlap", "partial_rollout") if key in entry.reads}
    return with_schedule(scenario, kind, **kept | {entry.dial.key: value})


def with_schedule(scenario: Scenario, kind: str, **keys) -> Scenario:
    """The scenario under another schedule; of the old one N, n and S are kept. `section__key` is of another section."""
    fresh = {"over_sampling_batch_size": None, "in_flight": None, "overlap": False, "partial_rollout": True}
    changes = fresh | {"kind": kind} | keys
    return scenario.with_keys(**{key if "__" in key else f"schedule__{key}": value for key, value in changes.items()})


def counts_samples(kind: type[Schedule]) -> bool:
    """Whether its dial does."""
    return kind.dial is not None and kind.dial.counts_samples


def counts_groups(kind: type[Schedule]) -> bool:
    return kind.dial is not None and not kind.dial.counts_samples


def dialled(kind: str, fits: Callable[[type[Schedule]], bool] = lambda entry: True) -> str:
    """`kind`, or where none is asked for the first shipped one whose dial can be turned, and that `fits`.

    Raises ConfigError for one that is asked for and is no such schedule.
    """
    able = [name for name in SCHEDULES.shipped if (entry := SCHEDULES.find(name)).dial and fits(entry)]
    if kind and not ((entry := SCHEDULES.find(kind)).dial and fits(entry)):
        raise ConfigError(
            f"key 'schedule.kind' = {kind!r} has nothing to turn here; use {' or '.join(map(repr, able))}, or leave "
            "the key out"
        )
    return kind or able[0]


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
