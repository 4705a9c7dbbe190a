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
    GRID,
    MUTED,
    ORANGE,
    RED,
    VIOLET,
    draw_boxes,
    new_figure,
    themed,
    to_svg,
)
from april.report.lanes import Lane, busy_share, make_lanes
from april.report.run_folder import Run, dig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_WORKERS = 24
MAX_DRAWN_BARS = 200
MANY_STEPS = 60
"""Above this a series is drawn faintly, with its moving mean."""
ZOOM_STEPS = 10
SPAN_RESOLUTION = 1000
"""Spans and marks nearer than this part of the drawn time are drawn as one."""
SHARE_INTERVALS = 120
BARS = [("generate", "generating", BLUE, 0.26), ("weights", "weight update", ORANGE, 0.38)]


@themed
def reward_picture(run: Run) -> str | None:
    steps = step_numbers(run)
    rewards = values(run, "reward")
    if not np.isfinite(rewards).any() and not run.evaluation:
        return None
    figure, (axes,) = new_figure(2.9)
    if len(steps):
        draw_series(axes, steps, rewards, BLUE, "training reward")
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
def gradient_picture(run: Run) -> str | None:
    shares = {
        name: np.array([number_or_nan(dig(step, "gradient", name)) for step in run.steps])
        for name in ("tokens", "groups")
    }
    if not any(np.isfinite(share).any() for share in shares.values()):
        return None
    figure, (axes,) = new_figure(2.2)
    for (name, share), color in zip(shares.items(), (BLUE, GREEN), strict=True):
        draw_series(axes, step_numbers(run), share, color, name)
    axes.set(xlabel="step", ylabel="share with a gradient")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend(axes)
    whole_steps(axes)
    return to_svg(figure, "shares of trained tokens and groups that bore a gradient, per step")


def number_or_nan(value: float | None) -> float:
    return np.nan if value is None else value


@themed
def throughput_picture(run: Run) -> str | None:
    steps, rates = step_numbers(run), values(run, "rollout_tokens_per_s")
    if not np.isfinite(rates).any():
        return None
    figure, (axes,) = new_figure(2.5)
    draw_series(axes, steps, rates, GREEN, "step")
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
    stride = math.ceil(len(run.steps) / MAX_DRAWN_BARS)
    firsts = np.arange(0, len(run.steps), stride)
    tokens = np.add.reduceat(tokens, firsts, axis=1) / np.diff([*firsts, len(run.steps)])
    steps = step_numbers(run)
    edges = np.append(steps[firsts] - 0.5, steps[-1] + 0.5)
    below = np.zeros(len(firsts))
    for age in range(len(AGES)):
        if tokens[age].any():
            label = f"age {age}" if age < oldest else f"age {oldest} or more"
            axes.stairs(below + tokens[age], edges, baseline=below, fill=True, color=AGES[age], label=label)
            below = below + tokens[age]
    axes.set(xlabel="step", ylabel="trained tokens" if stride == 1 else f"trained tokens (mean of {stride} steps)")
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
        lane | {"start": lane["start"] - origin_s, "end": max(lane["start"], lane.get("end") or 0) - origin_s}
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
        enlarged, one_by_one = axes is panels[-1], axes is panels[-1] or len(steps) <= MANY_STEPS
        lanes = make_lanes(entries, begin_s, end_s, SPAN_RESOLUTION if one_by_one else math.inf)[:MAX_DRAWN_WORKERS]
        if one_by_one:
            draw_spans(axes, lanes)
        else:
            draw_shares(axes, lanes, np.linspace(begin_s, end_s, SHARE_INTERVALS + 1))
        if enlarged:
            draw_instants(axes, lanes, "abort", VIOLET, "|", 12)
            mark_steps(axes, [(step, at_s) for step, at_s in steps if begin_s <= at_s <= end_s])
        draw_instants(axes, lanes, "joined", GREEN, "^", 6.5)
        draw_instants(axes, lanes, "lost", RED, "X", 7)
        axes.set_xlim(begin_s - 0.01 * (end_s - begin_s), end_s + 0.005 * (end_s - begin_s))
        axes.set_yticks(range(len(lanes)), [lane.worker for lane in lanes])
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
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


def draw_spans(axes: "Axes", lanes: list[Lane]) -> None:
    for kind, label, color, half_height in BARS:
        boxes = [
            (left, right, float(row)) for row, lane in enumerate(lanes) for left, right in lane.spans.get(kind, [])
        ]
        draw_boxes(axes, boxes, color, half_height, label)


def draw_shares(axes: "Axes", lanes: list[Lane], edges_s: np.ndarray) -> None:
    """In every row the share of each interval that is generation, and on it the share that is weight updates."""
    draw_boxes(axes, [(edges_s[0], edges_s[-1], row) for row in range(len(lanes))], GRID, 0.38, "")
    for row, lane in enumerate(lanes):
        level = np.full(len(edges_s) - 1, row + 0.38)
        for kind, _, color, _ in BARS:
            above = level - 0.76 * busy_share(lane.spans.get(kind, []), edges_s)
            axes.stairs(above, edges_s, baseline=level, fill=True, color=color, lw=0)
            level = above


def draw_instants(axes: "Axes", lanes: list[Lane], kind: str, color: str, marker: str, size: float) -> None:
    points = [(at_s, row) for row, lane in enumerate(lanes) for at_s in lane.instants.get(kind, [])]
    if points:
        x, y = zip(*points, strict=True)
        edge = 1.8 if marker == "|" else 0
        axes.plot(x, y, ls="", marker=marker, ms=size, mew=edge, color=color, clip_on=False, label=kind)


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


def draw_series(axes: "Axes", steps: np.ndarray, series: np.ndarray, color: str, label: str) -> None:
    """A point a step; of many steps a faint line, and their moving mean over it."""
    if len(steps) <= MANY_STEPS:
        axes.plot(steps, series, color=color, lw=1.6, marker="o", ms=3.2, label=label)
        return
    reach = max(2, len(steps) // 60)
    axes.plot(steps, series, color=color, lw=0.7, alpha=0.4, label=label)
    axes.plot(steps, moving_mean(series, reach), color=color, lw=2, label=f"mean of {2 * reach + 1} steps")


def moving_mean(series: np.ndarray, reach: int) -> np.ndarray:
    """Mean of each value and up to `reach` to either side, without those that are NaN."""
    return np.array([mean_known(series[max(0, at - reach) : at + reach + 1]) for at in range(len(series))])


def mean_known(part: np.ndarray) -> float:
    known = part[np.isfinite(part)]
    return float(known.mean()) if len(known) else math.nan


def whole_steps(axes: "Axes") -> None:
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)


def legend(axes: "Axes") -> None:
    """Above the picture, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=7, borderaxespad=0.2, borderpad=0)
