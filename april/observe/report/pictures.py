"""The report's pictures of rewards, speed, staleness and lengths, as inline SVG coloured by the page's CSS variables.

Every picture is None where the run has nothing to draw yet.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from april.observe.report.drawing import AGES, BLUE, GREEN, MUTED, ORANGE, WIDTH_IN, new_figure, themed, to_svg
from april.observe.report.run_folder import RunFolder, dig

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- curves over the steps --------------------------------------------------------------------------------------------

MANY_STEPS = 60
"""Number of steps above which a series is drawn as a faint line with its moving mean."""
MAX_DRAWN = 200
"""Most bars of a picture, or most intervals of a band from lowest to highest."""
LETTER_IN, MARK_IN = 0.072, 0.5
"""Width of a letter of the legend, and of the marker before a label, in inches."""


def step_numbers(run: RunFolder) -> np.ndarray:
    return np.array([step["step"] for step in run.steps])


def step_values(run: RunFolder, *keys: str) -> np.ndarray:
    """One figure of each step's record, float64 [steps]; NaN where it is missing."""
    figures = (dig(step, *keys) for step in run.steps)
    return np.array([value if isinstance(value, int | float) else np.nan for value in figures], dtype=float)


def draw_series(axes: "Axes", steps: np.ndarray, series: np.ndarray, color: str, label: str) -> None:
    """Draw one point per step; of many steps the moving mean over a faint line, or over a band from lowest to
    highest."""
    if len(steps) <= MANY_STEPS:
        axes.plot(steps, series, color=color, lw=1.6, marker="o", ms=3.2, label=label)
        return
    if len(steps) <= 2 * MAX_DRAWN:
        axes.plot(steps, series, color=color, lw=0.7, alpha=0.35)
    else:
        parts = np.array_split(np.arange(len(steps)), MAX_DRAWN)
        low, high = ([extreme(series[part]) for part in parts] for extreme in (lowest, highest))
        axes.fill_between([steps[part].mean() for part in parts], low, high, color=color, alpha=0.2, lw=0)
    mean = moving_mean(series, window_radius(len(steps)))
    every = max(1, len(steps) // (2 * MAX_DRAWN))
    axes.plot(steps[::every], mean[::every], color=color, lw=1.8, label=label)


def window_radius(steps: int) -> int:
    """Steps to either side that the moving mean includes; 0: no moving mean is drawn."""
    return max(2, steps // 60) if steps > MANY_STEPS else 0


def lowest(part: np.ndarray) -> float:
    return float(np.nanmin(part)) if np.isfinite(part).any() else math.nan


def highest(part: np.ndarray) -> float:
    return float(np.nanmax(part)) if np.isfinite(part).any() else math.nan


def moving_mean(series: np.ndarray, radius: int) -> np.ndarray:
    """Mean of the finite values up to `radius` positions to either side of each position."""
    return np.array([finite_mean(series[max(0, index - radius) : index + radius + 1]) for index in range(len(series))])


def finite_mean(part: np.ndarray) -> float:
    finite = part[np.isfinite(part)]
    return float(finite.mean()) if len(finite) else math.nan


def draw_stack(axes: "Axes", run: RunFolder, parts: list[tuple[str, str, np.ndarray]]) -> int:
    """Draw stacked bars of (label, color, figure of each step); returns the number of steps that each bar averages."""
    stride = math.ceil(len(run.steps) / MAX_DRAWN)
    firsts, steps = np.arange(0, len(run.steps), stride), step_numbers(run)
    edges = np.append(steps[firsts] - 0.5, steps[-1] + 0.5)
    below = np.zeros(len(firsts))
    for label, color, figures in parts:
        mean = np.add.reduceat(np.nan_to_num(figures), firsts) / np.diff([*firsts, len(run.steps)])
        if mean.any():
            axes.stairs(below + mean, edges, baseline=below, fill=True, color=color, label=label)
            below = below + mean
    axes.set_ylim(0, below.max() * 1.08 or 1)
    return stride


def finish_axes(axes: "Axes", run: RunFolder, with_legend: bool = True, below: bool = True) -> None:
    """Add integer step ticks, marks of resumes and the legend. `below`: label the x axis on this panel."""
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)
    if radius := window_radius(len(run.steps)):
        axes.set_xlabel(f"step (lines: means of {2 * radius + 1})" if axes.lines and below else "step" * below)
    else:
        axes.set_xlabel("step" * below)
    for resume in run.resumes:
        axes.axvline(resume["step"] + 0.5, color=MUTED, lw=1, ls=(0, (1, 2)), zorder=0.6)
    if with_legend:
        legend(axes)


def legend(axes: "Axes", lift_in: float = 0.0) -> int:
    """Draw the legend `lift_in` inches above the picture, in as many columns as fit; returns its number of rows."""
    from matplotlib.transforms import ScaledTranslation

    marks, labels = axes.get_legend_handles_labels()
    if not labels:
        return 0
    max_columns = int((WIDTH_IN - 0.7) / (MARK_IN + LETTER_IN * max(map(len, labels))))
    columns = max(1, min(max_columns, len(labels)))
    axes.legend(
        marks,
        labels,
        ncols=columns,
        handlelength=1.3,
        columnspacing=1.2,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=axes.transAxes + ScaledTranslation(0, lift_in, axes.figure.dpi_scale_trans),
        borderaxespad=0.2,
        borderpad=0,
    )
    return math.ceil(len(labels) / columns)


# --- pictures ---------------------------------------------------------------------------------------------------------

BINS_PER_DOUBLING = 4
"""Histogram bins per doubling of the response length."""


@themed
def reward_picture(run: RunFolder) -> str | None:
    steps = step_numbers(run)
    rewards = step_values(run, "reward")
    if not np.isfinite(rewards).any() and not run.evaluation:
        return None
    figure, (axes,) = new_figure(2.9)
    if len(steps):
        draw_series(axes, steps, rewards, BLUE, "training reward")
    named = {f"accuracy, {name}": points for name, points in run.named_evaluations.items()}
    evaluation_sets = {
        f"held-out accuracy{f', set {n}' if n > 1 else ''}": p for n, p in enumerate(run.evaluation_sets, 1)
    }
    for number, (label, points) in enumerate((named or evaluation_sets).items()):
        axes.plot(
            [point.get("step") or 0 for point in points],
            [point["accuracy"] for point in points],
            color=ORANGE,
            lw=1.2,
            ls=(0, (4, 3)),
            marker="Ds^v"[number % 4],
            ms=5.5,
            label=label,
        )
    axes.set_ylabel("reward, accuracy")
    finish_axes(axes, run)
    return to_svg(figure, "reward and held-out accuracy per step")


@themed
def gradient_picture(run: RunFolder) -> str | None:
    shares = {name: step_values(run, "gradient", name) for name in ("tokens", "groups")}
    if not any(np.isfinite(share).any() for share in shares.values()):
        return None
    figure, (axes,) = new_figure(2.2)
    for (name, share), color in zip(shares.items(), (BLUE, GREEN), strict=True):
        draw_series(axes, step_numbers(run), share, color, name)
    axes.set_ylabel("share with a gradient")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    finish_axes(axes, run)
    return to_svg(figure, "shares of trained tokens and groups that bore a gradient, per step")


@themed
def throughput_picture(run: RunFolder) -> str | None:
    steps, rates = step_numbers(run), step_values(run, "rollout_tokens_per_s")
    if not np.isfinite(rates).any():
        return None
    figure, (axes,) = new_figure(2.5)
    draw_series(axes, steps, rates, GREEN, "rollout")
    mean = run.summary.get("rollout_tokens_per_s")
    if mean:
        axes.axhline(mean, color=MUTED, lw=1, ls=(0, (4, 3)), label=f"whole run: {mean:,.0f} tokens/s")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0, float(np.nanmax(rates)) * 1.12 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    finish_axes(axes, run)
    return to_svg(figure, "rollout tokens per second, per step")


@themed
def staleness_picture(run: RunFolder) -> str | None:
    oldest = len(AGES) - 1
    tokens = np.zeros((len(AGES), len(run.steps)))
    for column, step in enumerate(run.steps):
        for age, count in (dig(step, "staleness", "tokens_by_age") or {}).items():
            tokens[min(int(age), oldest), column] += count or 0
    if not tokens.any():
        return None
    figure, (axes,) = new_figure(2.7)
    labels = [f"age {age}" if age < oldest else f"age {oldest} or more" for age in range(len(AGES))]
    stride = draw_stack(axes, run, list(zip(labels, AGES, tokens, strict=True)))
    axes.set_ylabel("trained tokens" if stride == 1 else f"trained tokens (mean of {stride} steps)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    finish_axes(axes, run)
    return to_svg(figure, "trained tokens by age, stacked, per step")


@themed
def lengths_picture(run: RunFolder) -> str | None:
    created, trained = (length_density(run, f"{which}_histogram") for which in ("created", "trained"))
    if created is None and trained is None:
        return None
    figure, (axes,) = new_figure(2.7)
    if created is not None:
        edges, density = created
        axes.stairs(
            density / BINS_PER_DOUBLING, edges, fill=True, color=MUTED, alpha=0.35, label=with_mean(run, "created")
        )
    if trained is not None:
        edges, density = trained
        axes.stairs(density / BINS_PER_DOUBLING, edges, color=BLUE, lw=1.8, label=with_mean(run, "trained"))
    longest = max(found[0][-1] for found in (created, trained) if found is not None)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    axes.set_xticks([2**power for power in range(math.ceil(math.log2(longest)) + 1)], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set(xlabel="response length (tokens)", ylabel="share in ¼ doubling")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend(axes)
    return to_svg(figure, "response lengths of created and of trained samples")


def length_density(run: RunFolder, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(bin edges in tokens [n + 1], share of samples per doubling of length [n]), summed over all steps.

    A length k covers [k, k + 1), so that bins of few lengths have the right height.
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


def with_mean(run: RunFolder, which: str) -> str:
    mean = dig(run.summary, "lengths", which, "mean")
    return which if mean is None else f"{which} (mean {mean:.1f} tokens)"
