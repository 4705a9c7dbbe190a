"""Variants of a scenario under the schedules to be compared, their no-barrier limit, and the table of their results."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Schedule
from april.config import ConfigError
from april.simulate.engine import SimulatedEngine, SimulatedSample
from april.simulate.measures import Measures
from april.simulate.pipeline import simulate
from april.simulate.scenario import Lengths, Scenario
from april.util.errors import refuse

# --- no-barrier limit -------------------------------------------------------------------------------------------------

WARM_UP_RUNS = 6
"""Number of responses that each slot generates before the no-barrier limit is measured. The warm-up also lasts at least
as many decode steps as the longest response has tokens."""


def no_barrier_limit(scenario: Scenario) -> float:
    """Tokens per second that the scenario's engines generate with as many samples in flight as its schedule wants, if
    each sample that ends is replaced at once, so that none waits for a batch or for weights."""
    lengths, engines = scenario.make_lengths(), scenario.engines
    per_engine, more = divmod(scenario.slots_wanted, engines.count)
    slots = [per_engine + (number < more) for number in range(engines.count)]
    groups = itertools.count()
    speeds = {count: _engine_limit(scenario, lengths, count, groups) if count else 0.0 for count in sorted(set(slots))}
    return sum(speeds[count] / slowdown for count, slowdown in zip(slots, engines.slowdowns, strict=True))


def _engine_limit(scenario: Scenario, lengths: Lengths, slots: int, groups: itertools.count) -> float:
    engine = SimulatedEngine("limit", scenario.cost, slots)
    shapes = ((lengths.prompt_of(group), length) for group in groups for length in lengths.of(group))
    samples = (SimulatedSample(number, prompt, 0, length, 0.0) for number, (prompt, length) in enumerate(shapes))
    for _ in range(slots):
        engine.submit(next(samples))
    ended, first = 0, None
    while first is None or ended < first[0] + scenario.limit_responses:
        for _ in engine.wake()[0]:
            ended += 1
            sample = next(samples)
            sample.arrives_s = engine.clock_s
            engine.submit(sample)
        if first is None and ended >= WARM_UP_RUNS * slots and engine.steps >= scenario.lengths.longest_tokens:
            first = ended, engine.clock_s, engine.generated
    return (engine.generated - first[2]) / (engine.clock_s - first[1])


# --- variants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulationResult:
    """A variant of a scenario with its measures and its upper bounds."""

    name: str
    scenario: Scenario
    measures: Measures
    limit: float
    """No-barrier limit (tokens/s): what the scenario's engines generate with as many samples in flight as its schedule
    wants, if each sample that ends is replaced at once."""
    cap: float
    """Upper bound on the throughput from the staleness bound or the rounds' barrier, as a share of `limit`."""

    @property
    def consumed_per_s(self) -> float:
        return self.measures.consumed_per_s

    @property
    def limit_share(self) -> float:
        return self.consumed_per_s / self.limit

    @property
    def cap_share(self) -> float:
        return self.limit_share / self.cap


def evaluate(name: str, scenario: Scenario) -> SimulationResult:
    return SimulationResult(
        name, scenario, simulate(scenario), no_barrier_limit(scenario), scenario.cap(scenario.make_lengths())
    )


def variants(scenario: Scenario, kind: str = "") -> tuple[dict[str, Scenario], dict[str, ConfigError]]:
    """(admitted variants by name, errors of the refused ones by name) of the schedules' own `variants`.

    `scenario` gives the groups in a batch (N), samples in a group, groups opened in a round (2 N if unset), staleness
    bound, samples in flight, and everything outside the schedule. `kind`: the only schedule compared; empty: all
    shipped ones and the scenario's own.
    """
    kinds = [kind] if kind else list(dict.fromkeys([*SCHEDULES.shipped, scenario.schedule.kind]))
    admitted, refused = {}, {}
    for kind_name in kinds:
        for variant, keys in SCHEDULES.find(kind_name).variants(scenario.schedule).items():
            name = f"{kind_name}, {variant}" if variant else kind_name
            try:
                admitted[name] = with_schedule(scenario, kind_name, **keys)
            except ConfigError as error:
                refused[name] = error
    return admitted, refused


def with_dial(scenario: Scenario, kind: str, value: int) -> Scenario:
    """The scenario under a kind of schedule whose dial (the key that sets its concurrency) is `value`; `overlap` and
    `partial_rollout` are kept if the kind reads them."""
    entry, schedule = SCHEDULES.find(kind), scenario.schedule
    kept = {key: getattr(schedule, key) for key in ("overlap", "partial_rollout") if key in entry.reads}
    return with_schedule(scenario, kind, **kept | {entry.dial.key: value})


def with_schedule(scenario: Scenario, kind: str, **keys) -> Scenario:
    """The scenario under another schedule that keeps the groups in a batch, the samples in a group and the staleness
    bound. `keys`: keys of the schedule; `section__key` sets a key of another section."""
    fresh = {"over_sampling_batch_size": None, "in_flight": None, "overlap": False, "partial_rollout": True}
    changes = fresh | {"kind": kind} | keys
    return scenario.with_keys(**{key if "__" in key else f"schedule__{key}": value for key, value in changes.items()})


def counts_samples(kind: type[Schedule]) -> bool:
    """Whether the schedule has a dial that counts samples in flight."""
    return kind.dial is not None and kind.dial.counts_samples


def counts_groups(kind: type[Schedule]) -> bool:
    """Whether the schedule has a dial that counts groups of a round."""
    return kind.dial is not None and not kind.dial.counts_samples


def kind_with_dial(kind: str, fits: Callable[[type[Schedule]], bool] = lambda entry: True) -> str:
    """`kind`, or if it is empty the first shipped schedule that has a dial (a key that sets its concurrency) and for
    which `fits(schedule)` is true.

    Raises ConfigError if `kind` has no dial or does not fit.
    """
    suitable = [name for name in SCHEDULES.shipped if (entry := SCHEDULES.find(name)).dial and fits(entry)]
    if kind and not ((entry := SCHEDULES.find(kind)).dial and fits(entry)):
        refuse(
            "schedule.kind",
            kind,
            "has no dial to set here",
            f"use {' or '.join(map(repr, suitable))}, or leave the key out",
        )
    return kind or suitable[0]


COLUMNS: dict[str, Callable[[SimulationResult], str]] = {
    "": lambda result: result.name,
    "consumed/s": lambda result: f"{result.consumed_per_s:,.0f}",
    "in rollout": lambda result: f"{result.measures.consumed_per_rollout_s:,.0f}",
    "generated/s": lambda result: f"{result.measures.generated_per_s:,.0f}",
    "gen. in rollout": lambda result: f"{result.measures.generated_per_rollout_s:,.0f}",
    "wasted": lambda result: f"{result.measures.wasted_share:.1%}",
    "recomputed": lambda result: f"{result.measures.recomputed_share:.1%}",
    "occupied": lambda result: f"{result.measures.occupancy:.1%}",
    "stale mean": lambda result: f"{result.measures.staleness_mean:.2f}",
    "max": lambda result: str(result.measures.staleness_max),
    "off-policy": lambda result: f"{result.measures.off_policy_share:.1%}",
    "step p50 s": lambda result: f"{result.measures.step_s[0]:.1f}",
    "p95 s": lambda result: f"{result.measures.step_s[1]:.1f}",
    "limit/s": lambda result: f"{result.limit:,.0f}",
    "of limit": lambda result: f"{result.limit_share:.3f}",
    "cap": lambda result: f"{result.cap:.3f}",
    "of cap": lambda result: f"{result.cap_share:.3f}",
    "KV peak": lambda result: f"{result.measures.kv_peak_share:.0%}",
    "buffer peak": lambda result: f"{result.measures.buffer_peak_tokens / 1e6:.2f} M",
    "retracted": lambda result: str(result.measures.measured.retractions),
    "learner busy": lambda result: f"{result.measures.learner_share:.1%}",
    "buffer_peak_tokens": lambda result: f"{result.measures.buffer_peak_tokens:,}",
    "buffer_peak_bytes": lambda result: f"{result.measures.buffer_peak_bytes:,}",
}
"""For each column's header, the function that makes the column's cell from a result."""
COMPARED = tuple(COLUMNS)[:19]
"""Headers of the columns in the table that compares schedules."""


def columns(result: SimulationResult, headers: Iterable[str] = COMPARED) -> list[str]:
    """Cells of one table row, in the order of `headers`."""
    return [COLUMNS[header](result) for header in headers]


def text_table(lines: list[list[str]], header: Sequence[str] = COMPARED) -> str:
    """A text table of `lines`, each a list of cells, below the `header`; columns are aligned, the first one flush
    left."""
    rows = [list(header), *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
