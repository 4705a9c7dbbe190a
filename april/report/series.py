"""Curves over the steps of a run: one point per step, or the moving mean of many steps, with resumes marked."""

import math
from typing import TYPE_CHECKING

import numpy as np

from april.report.drawing import MUTED, WIDTH_IN
from april.report.run_folder import RunFolder, dig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY_STEPS = 60
"""Steps above which a series is drawn faintly, with its moving mean."""
MAX_DRAWN = 200
"""Most bars, or intervals of a band, in a picture."""
LETTER_IN, MARK_IN = 0.072, 0.5
"""Width of a letter of the legend, and of the marker before a label, in inches."""


def step_numbers(run: RunFolder) -> np.ndarray:
    return np.array([step["step"] for step in run.steps])


def values(run: RunFolder, *keys: str) -> np.ndarray:
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
