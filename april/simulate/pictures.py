"""Charts of simulations in the report's style, one PNG each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from april.report.drawing import AGES, BLUE, GREEN, MUTED, ORANGE, STYLE, new_figure
from april.simulate.sweep import Sweep
from april.simulate.variants import SimulationResult

MAX_STEPS = 200


def draw(path: Path, picture: Callable[[], Any]) -> str:
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
    """Throughput over the largest buffer, one point per N'."""
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
