"""The report's pictures: a run in, inline SVG out, coloured by the page's CSS variables so that both themes work.

Every picture returns None where the run has nothing to draw yet.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from april.report.drawing import (
    AGES,
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    RED,
    VIOLET,
    draw_boxes,
    new_figure,
    themed,
    to_svg,
)
from april.report.lanes import Lane, make_lanes
from april.report.run_folder import Run, dig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_WORKERS = 24
ZOOM_STEPS = 10
STRIP_RESOLUTION = 600
ZOOM_RESOLUTION = 2000


@themed
def reward_picture(run: Run) -> str | None:
    steps = step_numbers(run)
    rewards = values(run, "reward")
    if not np.isfinite(rewards).any() and not run.evaluation:
        return None
    figure, (axes,) = new_figure(2.9)
    many = len(steps) > 60
    if len(steps):
        axes.plot(
            steps,
            rewards,
            color=BLUE,
            lw=0.8 if many else 1.6,
            alpha=0.45 if many else 1.0,
            marker=None if many else "o",
            ms=3.2,
            label=None if many else "training reward (mean of the batch)",
        )
    if many:
        window = max(5, len(steps) // 25)
        axes.plot(
            steps,
            moving_mean(rewards, window),
            color=BLUE,
            lw=2,
            label=f"training reward (mean of {window} steps)",
        )
    if run.evaluation:
        axes.plot(
            [point.get("step") or 0 for point in run.evaluation],
            [point["accuracy"] for point in run.evaluation],
            color=ORANGE,
            lw=1.2,
            ls=(0, (4, 3)),
            marker="D",
            ms=5.5,
            label="held-out accuracy",
        )
    axes.set(xlabel="step", ylabel="reward, accuracy")
    whole_steps(axes)
    legend(axes)
    return to_svg(figure, "reward and held-out accuracy per step")


@themed
def throughput_picture(run: Run) -> str | None:
    steps, rates = step_numbers(run), values(run, "rollout_tokens_per_s")
    if not np.isfinite(rates).any():
        return None
    figure, (axes,) = new_figure(2.5)
    few = len(steps) <= 60
    axes.plot(steps, rates, color=GREEN, lw=1.6 if few else 1.0, marker="o" if few else None, ms=3.2)
    mean = run.summary.get("rollout_tokens_per_s")
    if mean:
        axes.axhline(mean, color=MUTED, lw=1, ls=(0, (4, 3)), label=f"whole run: {mean:,.0f} tokens/s")
        legend(axes)
    axes.set(xlabel="step", ylabel="tokens/s")
    axes.set_ylim(0, float(np.nanmax(rates)) * 1.12 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    whole_steps(axes)
    return to_svg(figure, "rollout tokens per second, per step")


@themed
def staleness_picture(run: Run) -> str | None:
    oldest = len(AGES) - 1
    tokens = np.zeros((len(AGES), len(run.steps)))
    for column, step in enumerate(run.steps):
        for age, count in (dig(step, "staleness", "tokens_by_age") or {}).items():
            tokens[min(int(age), oldest), column] += count or 0
    if not tokens.any():
        return None
    figure, (axes,) = new_figure(2.7)
    steps = step_numbers(run)
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    below = np.zeros(len(steps))
    for age in range(len(AGES)):
        if tokens[age].any():
            label = f"age {age}" if age < oldest else f"age {oldest} or more"
            axes.stairs(below + tokens[age], edges, baseline=below, fill=True, color=AGES[age], label=label)
            below = below + tokens[age]
    axes.set(xlabel="step", ylabel="trained tokens")
    axes.set_ylim(0, below.max() * 1.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    whole_steps(axes)
    legend(axes)
    return to_svg(figure, "trained tokens by age, stacked, per step")


@themed
def lengths_picture(run: Run) -> str | None:
    created, trained = (length_density(run, f"{which}_histogram") for which in ("created", "trained"))
    if created is None and trained is None:
        return None
    figure, (axes,) = new_figure(2.7)
    if created is not None:
        edges, density = created
        axes.stairs(density, edges, fill=True, color=MUTED, alpha=0.35, label=with_mean(run, "created"))
    if trained is not None:
        edges, density = trained
        axes.stairs(density, edges, color=BLUE, lw=1.8, label=with_mean(run, "trained"))
    longest = max(found[0][-1] for found in (created, trained) if found is not None)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    axes.set_xticks([2**power for power in range(math.ceil(math.log2(longest)) + 1)], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set(xlabel="response length (tokens)", ylabel="share per doubling")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend(axes)
    return to_svg(figure, "response lengths of created and of trained samples")


def length_density(run: Run, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(bin edges in tokens, share of samples per doubling of length), summed over all steps.

    A length k covers [k, k + 1), so that bins of few lengths are as tall as they should be.
    """
    counts: dict[int, int] = {}
    for step in run.steps:
        for index, count in (dig(step, "lengths", key) or {}).items():
            counts[max(int(index), 0)] = counts.get(max(int(index), 0), 0) + (count or 0)
    total = sum(counts.values())
    if not total:
        return None
    starts = [i for i in range(max(counts) + 1) if first_length(i) < first_length(i + 1)]
    ends = [*starts[1:], max(counts) + 1]
    edges = np.array([first_length(i) for i in [*starts, ends[-1]]])
    shares = np.array([sum(counts.get(i, 0) for i in range(a, b)) for a, b in zip(starts, ends, strict=True)]) / total
    return edges, shares / np.diff(np.log2(edges))


def first_length(index: int) -> int:
    """The smallest length of histogram bin `index`, which counts [2^(index/4), 2^((index+1)/4)) tokens."""
    return math.ceil(2 ** (index / 4) - 1e-9)


def with_mean(run: Run, which: str) -> str:
    mean = dig(run.summary, "lengths", which, "mean")
    return which if mean is None else f"{which} (mean {mean:.1f} tokens)"


@themed
def lanes_picture(run: Run) -> str | None:
    """The whole run, and the last steps enlarged where the run is longer than that."""
    if not run.lanes:
        return None
    origin_s = min(lane["start"] for lane in run.lanes)
    entries = [
        lane | {"start": lane["start"] - origin_s, "end": (lane.get("end") or lane["start"]) - origin_s}
        for lane in run.lanes
    ]
    steps = [(step["step"], step["time"] - origin_s) for step in run.steps if step.get("time") is not None]
    windows = [(0.0, max(1e-3, *(entry["end"] for entry in entries)))]
    if len(steps) > ZOOM_STEPS + 2:
        windows.append((steps[-ZOOM_STEPS - 1][1], steps[-1][1]))
    rows = min(len({entry["worker"] for entry in entries}), MAX_DRAWN_WORKERS)
    row_in = 0.34 if rows <= 8 else 0.24
    figure, panels = new_figure(len(windows) * (row_in * rows + 0.8) + 0.3, len(windows))
    for axes, (begin_s, end_s) in zip(panels, windows, strict=True):
        enlarged = axes is panels[-1]
        lanes = make_lanes(entries, begin_s, end_s, ZOOM_RESOLUTION if enlarged else STRIP_RESOLUTION)
        draw_lanes(axes, lanes[:MAX_DRAWN_WORKERS], enlarged)
        axes.set_xlim(begin_s - 0.01 * (end_s - begin_s), end_s + 0.005 * (end_s - begin_s))
        if enlarged:
            mark_steps(axes, [(step, at_s) for step, at_s in steps if begin_s <= at_s <= end_s])
    if len(windows) > 1:
        panels[0].set_title("whole run", loc="left", pad=8)
        panels[1].set_title(f"last {ZOOM_STEPS} steps", loc="left", pad=18)
    panels[-1].set_xlabel("time since the first worker event (s)")
    named = {label: mark for panel in panels for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    room_above = 0 if len(panels) > 1 else 0.2 / (row_in * rows)
    panels[0].legend(
        named.values(),
        named,
        loc="lower right",
        bbox_to_anchor=(1, 1 + room_above),
        ncols=5,
        handlelength=1.2,
        borderpad=0,
    )
    return to_svg(figure, "what every worker did over time")


def draw_lanes(axes: "Axes", lanes: list[Lane], with_aborts: bool) -> None:
    """Bars for spans, symbols for instants; one path for each kind keeps thousands of them small."""
    rows = range(len(lanes))
    bars = [("generate", "generating", BLUE, 0.26), ("weights", "weight update", ORANGE, 0.4)]
    for kind, label, color, half_height in bars:
        boxes = [(*span, row) for row in rows for span in lanes[row].spans.get(kind, [])]
        draw_boxes(axes, boxes, color, half_height, label)
    for kind, color, marker, size in [("abort", VIOLET, "|", 12), ("joined", GREEN, "^", 6.5), ("lost", RED, "X", 7)]:
        points = [(at_s, row) for row in rows for at_s in lanes[row].instants.get(kind, [])]
        if points and (kind != "abort" or with_aborts):
            look = {"marker": marker, "ms": size, "mew": 1.8 if kind == "abort" else 0, "color": color}
            axes.plot(*zip(*points, strict=True), ls="", clip_on=False, label=kind, **look)
    axes.set_yticks(rows, [lane.worker for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def mark_steps(axes: "Axes", steps: list[tuple[int, float]]) -> None:
    """A thin line where each step was recorded, its number above."""
    for step, at_s in steps:
        axes.axvline(at_s, color=MUTED, lw=0.7, ls=(0, (2, 2)), zorder=0.5)
        axes.annotate(
            f"{step}",
            (at_s, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=MUTED,
            fontsize=8,
        )


def step_numbers(run: Run) -> np.ndarray:
    return np.array([step["step"] for step in run.steps])


def values(run: Run, key: str) -> np.ndarray:
    """One figure per step, NaN where a step has none."""
    return np.array([np.nan if step.get(key) is None else step[key] for step in run.steps], dtype=float)


def moving_mean(series: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to `window - 1` before it, without those that are NaN."""
    return np.array([mean_known(series[max(0, end - window) : end]) for end in range(1, len(series) + 1)])


def mean_known(part: np.ndarray) -> float:
    known = part[np.isfinite(part)]
    return float(known.mean()) if len(known) else math.nan


def whole_steps(axes: "Axes") -> None:
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)


def legend(axes: "Axes") -> None:
    """Above the picture, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=7, borderaxespad=0.2, borderpad=0)
