"""Curves over the steps of a run: a point a step, of many steps their moving mean; resumes are marked in each."""

import math
from typing import TYPE_CHECKING

import numpy as np

from april.report.drawing import MUTED, WIDTH_IN
from april.report.run_folder import Run, dig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY_STEPS = 60
"""Above this a series is drawn faintly, with its moving mean."""
MAX_DRAWN = 200
"""bars, or intervals of a band"""
LETTER_IN, MARK_IN = 0.072, 0.5
"""width of a letter of the legend, and of what stands before a name"""


def step_numbers(run: Run) -> np.ndarray:
    return np.array([step["step"] for step in run.steps])


def values(run: Run, *keys: str) -> np.ndarray:
    """One figure per step, NaN where a step has none."""
    found = (dig(step, *keys) for step in run.steps)
    return np.array([value if isinstance(value, int | float) else np.nan for value in found], dtype=float)


def draw_series(axes: "Axes", steps: np.ndarray, series: np.ndarray, color: str, label: str) -> None:
    """A point a step; of many steps the moving mean over a faint line, or over a band from the least to the most."""
    if len(steps) <= MANY_STEPS:
        axes.plot(steps, series, color=color, lw=1.6, marker="o", ms=3.2, label=label)
        return
    if len(steps) <= 2 * MAX_DRAWN:
        axes.plot(steps, series, color=color, lw=0.7, alpha=0.35)
    else:
        parts = np.array_split(np.arange(len(steps)), MAX_DRAWN)
        low, high = ([extreme(series[part]) for part in parts] for extreme in (least, most))
        axes.fill_between([steps[part].mean() for part in parts], low, high, color=color, alpha=0.2, lw=0)
    mean = moving_mean(series, reach_of(len(steps)))
    every = max(1, len(steps) // (2 * MAX_DRAWN))
    axes.plot(steps[::every], mean[::every], color=color, lw=1.8, label=label)


def reach_of(steps: int) -> int:
    """To either side of a step, of the moving mean; 0: none is drawn."""
    return max(2, steps // 60) if steps > MANY_STEPS else 0


def least(part: np.ndarray) -> float:
    return float(np.nanmin(part)) if np.isfinite(part).any() else math.nan


def most(part: np.ndarray) -> float:
    return float(np.nanmax(part)) if np.isfinite(part).any() else math.nan


def moving_mean(series: np.ndarray, reach: int) -> np.ndarray:
    """Mean of each value and up to `reach` to either side, without those that are NaN."""
    return np.array([mean_known(series[max(0, at - reach) : at + reach + 1]) for at in range(len(series))])


def mean_known(part: np.ndarray) -> float:
    known = part[np.isfinite(part)]
    return float(known.mean()) if len(known) else math.nan


def draw_stack(axes: "Axes", run: Run, parts: list[tuple[str, str, np.ndarray]]) -> int:
    """Bars of (label, colour, figure of each step) upon each other; the steps that a bar is the mean of."""
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


def finish(axes: "Axes", run: Run, named: bool = True, below: bool = True) -> None:
    """Whole steps, marks where the run was resumed, and the legend; `below`: this panel says what the axis is."""
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)
    if reach := reach_of(len(run.steps)):
        axes.set_xlabel(f"step (lines: means of {2 * reach + 1})" if axes.lines and below else "step" * below)
    else:
        axes.set_xlabel("step" * below)
    for resume in run.resumes:
        axes.axvline(resume["step"] + 0.5, color=MUTED, lw=1, ls=(0, (1, 2)), zorder=0.6)
    if named:
        legend(axes)


def legend(axes: "Axes", lift_in: float = 0.0) -> int:
    """Above the picture, where it covers nothing, by `lift_in` inches, in as many columns as there is room for; returns
    the number of its rows."""
    from matplotlib.transforms import ScaledTranslation

    marks, labels = axes.get_legend_handles_labels()
    if not labels:
        return 0
    room = int((WIDTH_IN - 0.7) / (MARK_IN + LETTER_IN * max(map(len, labels))))
    columns = max(1, min(room, len(labels)))
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
