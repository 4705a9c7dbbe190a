"""Sweeps and experiments for planning, each with its table and its chart.

A sweep varies one key of the schedule or the hardware, and the rest is as in the scenario.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from april.broker.schedules import SCHEDULES
from april.broker.telemetry.lengths import describe_lengths
from april.simulate.scenario import Scenario
from april.simulate.variants import (
    SimulationResult,
    columns,
    counts_groups,
    counts_samples,
    evaluate,
    kind_with_dial,
    text_table,
    with_dial,
)
from april.util.errors import refuse

FACTORS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Swept values of N' / N and of samples in flight / (N * n); the latter also below 1. N': groups opened in a round
(`over_sampling_batch_size`); N: groups in a batch; n: samples in a group."""
FEWER_IN_FLIGHT = (0.25, 0.5, 1.0)
STALENESS = (1, 2, 3, 4, 5, 6, 8, 12)
ENGINE_SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Swept numbers of engines, as multiples of the number in the scenario."""

UNITS = {True: "in flight", False: "groups in a round"}
"""What a schedule's dial (the key that sets its concurrency) counts, as words for tables, by whether it counts samples
(True) or groups (False)."""

HEADER = (
    "consumed/s", "of limit", "stale mean", "max", "occupied", "KV peak", "retracted", "step p50 s", "learner busy",
)  # fmt: skip
BUFFERS_HEADER = ("consumed/s", "buffer_peak_tokens", "buffer_peak_bytes", "stale mean")


@dataclass(frozen=True)
class Sweep:
    title: str
    axis: str
    """Name of the swept quantity, with its unit."""
    points: list[tuple[float, SimulationResult]]

    def table(self) -> str:
        lines = [[f"{value:g}", *columns(result, HEADER)] for value, result in self.points]
        return text_table(lines, (self.axis, *HEADER))


def sweeps(scenario: Scenario, kind: str = "") -> list[Sweep]:
    """One sweep over each schedule's dial, then the staleness bound and the number of engines for one schedule. `kind`:
    the only schedule swept; empty: all shipped schedules, and for the last two sweeps one that counts samples in
    flight. Raises ConfigError."""
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
            for count in sorted({max(1, round(part * scenario.engines.count)) for part in ENGINE_SHARES})
        ]),
    ]  # fmt: skip


def batches_ahead(scenario: Scenario) -> int:
    """Number of batches whose groups the schedule may have open at a time, less `max_staleness`: 1, or 0 with
    `overlap`."""
    return scenario.schedule.batches_in_reach - scenario.schedule.max_staleness


def dial_value(scenario: Scenario, kind: str) -> int:
    """Value in the scenario of the dial of the schedule `kind` (the key that sets its concurrency); if unset, the value
    that keeps two batches in flight, or one if `max_staleness` is 0."""
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
    """The `factors` that the staleness bound admits: groups opened in a round, as multiples of the groups in a batch
    (N' / N). Raises ConfigError if there are none."""
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


# --- experiments ------------------------------------------------------------------------------------------------------

HISTOGRAM_GROUPS = 4096
"""Number of groups whose response lengths make the histogram."""
COMPARED_FACTORS = (1.5, 2.0, 3.0)


def lengths_experiment(scenario: Scenario, kind: str = "") -> tuple[str, np.ndarray]:
    """(table of statistics, int [samples]) of the response lengths of a scenario, in tokens. No schedule affects them:
    `kind` is ignored."""
    drawn = scenario.make_lengths().sample(HISTOGRAM_GROUPS)
    found = describe_lengths(Counter(drawn.ravel().tolist())) or {}
    longest_of_group = drawn.max(axis=1)
    longest = scenario.lengths.longest_tokens
    rows = [
        ["responses", f"{drawn.size:,}"],
        *([name, f"{value:,.0f}"] for name, value in found.items()),
        ["cut at the budget", f"{(drawn == longest).mean():.2%}"],
        ["groups with one that is cut", f"{(longest_of_group == longest).mean():.1%}"],
        ["mean of the longest in a group", f"{longest_of_group.mean():,.0f}"],
        ["p99 over median", f"{found['p99'] / found['p50']:.2f}"],
    ]
    return text_table(rows, ("response lengths", "tokens")), drawn.ravel()


def buffers_experiment(scenario: Scenario, kind: str = "") -> tuple[str, list[tuple[float, SimulationResult]]]:
    """Throughput and largest buffer if a round opens N' = 1.5, 2 and 3 times as many groups as a batch has (N): (table,
    [(N' / N, result)]). `kind`: the schedule; empty: the first shipped one that has rounds of N' groups. Raises
    ConfigError."""
    groups, kind = scenario.schedule.rollout_batch_size, kind_with_dial(kind, counts_groups)
    points = [
        (factor, evaluate(f"{factor:g} N", with_dial(scenario, kind, round(factor * groups))))
        for factor in admitted(scenario, COMPARED_FACTORS)
    ]
    lines = [[result.name, *columns(result, BUFFERS_HEADER)] for _, result in points]
    return text_table(lines, ("N'", *BUFFERS_HEADER)), points


def versions_experiment(scenario: Scenario, kind: str = "") -> tuple[str, SimulationResult]:
    """Simulate the scenario's own schedule (`kind` is ignored): (table, result) with the share of the trained tokens by
    their age in policy steps."""
    result = evaluate(scenario.schedule.kind, scenario)
    ages = result.measures.tokens_by_age
    lines = [[f"{age}", f"{ages[age]:,}", f"{ages[age] / ages.total():.1%}"] for age in sorted(ages)]
    return text_table(lines, ("age (policy steps)", "trained tokens", "share")), result


# --- charts -----------------------------------------------------------------------------------------------------------

INK, MUTED, GRID = "#1c2129", "#59636f", "#e2e6eb"
BLUE, ORANGE, GREEN = "#2f6fdf", "#c8590d", "#1a7f4c"
AGES = ["#c5daf6", "#93b9ef", "#5f95e5", "#3672ca", "#2050a1", "#133473", "#0a2150"]
"""Colors for tokens of age 0, 1, ... 5 in policy steps; the last color is for all older ones."""
STYLE = {
    "font.family": "sans-serif", "font.size": 9,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "axes.linewidth": 1,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlecolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "ytick.major.size": 0, "legend.frameon": False, "legend.labelcolor": INK, "legend.fontsize": 8.5,
    "path.simplify": True, "text.parse_math": False,
}  # fmt: skip
WIDTH_IN = 5.6
MAX_STEPS = 200


def write_picture(path: Path, picture: Callable[[], Any]) -> str:
    """Write the figure that `picture` returns as a PNG; returns its path, or why there is none."""
    try:
        from matplotlib import rc_context, rcParamsDefault
    except ImportError:
        return f"{path}: no picture without matplotlib; run `pip install 'april-rl[report]'`"

    with rc_context({**rcParamsDefault, **STYLE}):
        figure = picture()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, facecolor="white")
    return str(path)


def new_figure(height_in: float, panels: int = 1):
    """A matplotlib figure and its `panels` axes, stacked vertically."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="none")
    axes = list(figure.subplots(panels, squeeze=False)[:, 0])
    for panel in axes:
        panel.set_facecolor("none")
    return figure, axes


def sweep_picture(sweep: Sweep):
    """Throughput with the no-barrier limit, and staleness, over the swept quantity."""
    figure, (speed, age) = new_figure(4.6, 2)
    x = [value for value, _ in sweep.points]
    speed.plot(x, [result.consumed_per_s for _, result in sweep.points], color=BLUE, marker="o", ms=4, label="consumed")
    speed.plot(x, [result.limit for _, result in sweep.points], color=MUTED, ls=(0, (4, 3)), label="no-barrier limit")
    age.plot(
        x, [result.measures.staleness_mean for _, result in sweep.points], color=ORANGE, marker="o", ms=4, label="mean"
    )
    age.plot(
        x, [result.measures.staleness_max for _, result in sweep.points], color=MUTED, ls=(0, (4, 3)), label="largest"
    )
    speed.set_title(sweep.title, loc="left", pad=18)
    speed.set(ylabel="tokens/s")
    age.set(xlabel=sweep.axis, ylabel="staleness (steps)")
    for axes in (speed, age):
        axes.set_ylim(0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, borderpad=0)
    return figure


def lengths_picture(drawn: np.ndarray):
    """Histogram of response lengths, int [samples]."""
    figure, (axes,) = new_figure(2.7)
    counts, edges = np.histogram(drawn, bins=60)
    axes.stairs(counts / drawn.size, edges, fill=True, color=BLUE)
    for share, name in ((50, "median"), (99, "99 %")):
        at = float(np.percentile(drawn, share))
        axes.axvline(at, color=ORANGE, lw=1.2, ls=(0, (4, 3)))
        axes.annotate(f"{name} {at:,.0f}", (at, 0.97), xycoords=axes.get_xaxis_transform(), xytext=(4, 0),
                      textcoords="offset points", va="top", color=ORANGE, fontsize=8.5)  # fmt: skip
    axes.set(xlabel="response length (tokens)", ylabel="share of responses")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return figure


def buffers_picture(points: list[tuple[float, SimulationResult]]):
    """Figure of the throughput over the largest size of the buffer. `points`: (N' / N, result), with N' groups opened
    in a round and N groups in a batch."""
    figure, (axes,) = new_figure(2.7)
    x = [result.measures.buffer_peak_bytes / 2**20 for _, result in points]
    axes.plot(x, [result.consumed_per_s for _, result in points], color=GREEN, marker="o", ms=5)
    for size_mib, (_, result) in zip(x, points, strict=True):
        axes.annotate(f"N' = {result.name}", (size_mib, result.consumed_per_s), xytext=(0, -14),
                      textcoords="offset points", ha="center", fontsize=8.5)  # fmt: skip
    axes.set_ylim(0, max(result.consumed_per_s for _, result in points) * 1.15)
    axes.margins(x=0.12)
    axes.set(xlabel="largest buffer (MiB of ids and log-probabilities)", ylabel="consumed tokens/s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return figure


def versions_picture(result: SimulationResult):
    """Share of each batch's tokens by age, stacked."""
    figure, (axes,) = new_figure(2.9)
    steps = result.measures.steps[-MAX_STEPS:]
    oldest = len(AGES) - 1
    tokens = np.zeros((len(AGES), len(steps)))
    for column, step in enumerate(steps):
        for age, count in step.tokens_by_age.items():
            tokens[min(age, oldest), column] += count / step.tokens
    edges = np.array([step.step for step in steps] + [steps[-1].step + 1]) - 0.5
    below = np.zeros(len(steps))
    for age in range(len(AGES)):
        if tokens[age].any():
            label = f"age {age}" if age < oldest else f"age {oldest} or more"
            axes.stairs(below + tokens[age], edges, baseline=below, fill=True, color=AGES[age], label=label)
            below = below + tokens[age]
    axes.set(xlabel="step", ylabel="trained tokens")
    axes.set_ylim(0, 1)
    axes.set_xlim(edges[0], edges[-1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=7, borderaxespad=0.2, borderpad=0)
    return figure


@dataclass(frozen=True)
class Experiment:
    run: Callable[[Scenario, str], tuple[str, Any]]
    """Function that runs the experiment: (scenario, kind of schedule or "") -> (table, results). Raises ConfigError."""
    picture: Callable[[Any], Any]
    """Function that plots the experiment: results -> matplotlib figure."""


EXPERIMENTS = {
    "lengths": Experiment(lengths_experiment, lengths_picture),
    "buffers": Experiment(buffers_experiment, buffers_picture),
    "versions": Experiment(versions_experiment, versions_picture),
}
"""Experiments of `april simulate --experiment`, by name."""
