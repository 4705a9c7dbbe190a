"""The report's pictures of the learner: reward details, loss and its like, lengths, phases of a step, stale tokens."""

import math

import numpy as np

from april.observe.report.drawing import (
    AGES,
    BLUE,
    GREEN,
    GRID,
    MUTED,
    ORANGE,
    RED,
    VIOLET,
    WAITING,
    new_figure,
    themed,
    to_svg,
)
from april.observe.report.pictures import MAX_DRAWN, draw_series, draw_stack, finish_axes, step_numbers, step_values
from april.observe.report.run_folder import RunFolder, dig

COLORS = (BLUE, ORANGE, GREEN, VIOLET, RED, MUTED)
FIGURES = (
    ("loss", "loss", BLUE),
    ("grad_norm", "gradient norm", ORANGE),
    ("entropy", "entropy (nats)", GREEN),
    ("lr", "learning rate", VIOLET),
)
PHASES = (
    ("wait_s", "waits for a batch", GRID),
    ("prepare_s", "prepares", AGES[0]),
    ("forward_s", "forward", AGES[2]),
    ("backward_s", "backward", AGES[4]),
    ("optimizer_s", "optimizer", GREEN),
    ("metrics_s", "metrics", MUTED),
    ("gather_s", "gathers weights", ORANGE),
    ("canary_s", "scores the canary", VIOLET),
    ("publish_wait_s", "waits for the last weights to be sent", WAITING["wait-weights"]),
    ("checkpoint_s", "checkpoint", RED),
)


@themed
def details_picture(run: RunFolder) -> str | None:
    """Picture of the reward's components over the steps; of many components those that vary most."""
    names = sorted({name for step in run.steps for name in step.get("reward_details") or {}})
    series = {name: step_values(run, "reward_details", name) for name in names}
    series = {name: figures for name, figures in series.items() if np.isfinite(figures).any()}
    if not series:
        return None
    chosen = sorted(series, key=lambda name: -float(np.nanstd(series[name])))[: len(COLORS)]
    figure, (axes,) = new_figure(2.6)
    for name, color in zip(sorted(chosen), COLORS, strict=False):
        draw_series(axes, step_numbers(run), series[name], color, name)
    axes.set_ylabel("mean of a batch")
    finish_axes(axes, run)
    return to_svg(figure, "what the reward is made of, per step")


@themed
def learner_picture(run: RunFolder) -> str | None:
    """Picture of the learner's metrics over the steps, one panel per metric."""
    drawn = [(label, color, step_values(run, "learner", name)) for name, label, color in FIGURES]
    drawn = [(label, color, series) for label, color, series in drawn if np.isfinite(series).any()]
    if not drawn:
        return None
    figure, panels = new_figure(0.5 + 0.95 * len(drawn), len(drawn))
    for axes, (label, color, series) in zip(panels, drawn, strict=True):
        draw_series(axes, step_numbers(run), series, color, label)
        axes.set_title(label, loc="left", fontweight="normal", pad=3)
        axes.locator_params(axis="y", nbins=4)
        finish_axes(axes, run, with_legend=False, below=axes is panels[-1])
    return to_svg(figure, "loss, gradient norm, entropy and learning rate per step")


@themed
def lengths_by_step_picture(run: RunFolder) -> str | None:
    statistics = [("p95", "95 of 100 are shorter", ORANGE), ("mean", "mean", BLUE), ("p50", "median", GREEN)]
    curves = [(label, color, step_values(run, "lengths", "trained", name)) for name, label, color in statistics]
    if not any(np.isfinite(series).any() for _, _, series in curves):
        return None
    figure, (axes,) = new_figure(2.6)
    for label, color, series in curves:
        draw_series(axes, step_numbers(run), series, color, label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("trained responses (tokens)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    finish_axes(axes, run)
    return to_svg(figure, "lengths of the trained responses per step")


@themed
def phases_picture(run: RunFolder) -> str | None:
    parts = [(label, color, step_values(run, "learner", name)) for name, label, color in PHASES]
    if not any(np.isfinite(seconds).any() for _, _, seconds in parts):
        # An external trainer may report only how long a step took.
        parts = [("trains", AGES[3], step_values(run, "learner", "train_s"))]
    if not any(dig(step, "learner") for step in run.steps) or not any(np.nansum(seconds) for _, _, seconds in parts):
        return None
    figure, (axes,) = new_figure(2.9)
    stride = draw_stack(axes, run, parts)
    axes.set_ylabel("seconds a step" if stride == 1 else f"seconds a step (mean of {stride})")
    finish_axes(axes, run)
    return to_svg(figure, "the learner's seconds by what they were spent on, per step")


# --- stale tokens -----------------------------------------------------------------------------------------------------

SHARES = (
    ("ess", "effective: ratios", BLUE),
    ("sequence_ess", "effective: responses", AGES[4]),
    ("weight_ess", "effective: weights", GREEN),
    ("off_policy_share", "off-policy", VIOLET),
    ("clip_fraction", "clipped", ORANGE),
    ("truncated_fraction", "truncated", AGES[2]),
    ("mask_fraction", "masked", RED),
)
VERSION_SHARE = "version_share_"
LARGEST_DOT = 60.0
"""Area, in points squared, of the dot of a version that sampled the whole batch."""


@themed
def corrections_picture(run: RunFolder) -> str | None:
    """Above, shares of the trained tokens per step; below, one dot per policy version of a batch, by its age in
    steps."""
    dots = version_dots(run)
    if not len(dots):
        return None
    figure, (above, below) = new_figure(4.2, panels=2)
    steps = step_numbers(run)
    for name, label, color in SHARES:
        series = step_values(run, "learner", name)
        if np.isfinite(series).any():
            draw_series(above, steps, series, color, label)
    above.set(ylabel="share of tokens", ylim=(-0.03, 1.05))
    finish_axes(above, run, below=False)
    step, version, share = dots[dots[:, 0] % math.ceil(len(steps) / MAX_DRAWN) == 0].T
    below.scatter(step, step - 1 - version, s=LARGEST_DOT * share, color=BLUE, lw=0)
    below.set_ylabel("age of version")
    below.locator_params(axis="y", integer=True, min_n_ticks=1)
    finish_axes(below, run, with_legend=False)
    return to_svg(figure, "effective sample share, clipped, truncated and masked tokens, and policy versions per step")


def version_dots(run: RunFolder) -> np.ndarray:
    """(step, policy step of the version, share of the batch's tokens) of each recorded version; float64 [n, 3]."""
    dots = [
        (step["step"], int(name.removeprefix(VERSION_SHARE)), share)
        for step in run.steps
        for name, share in (step.get("learner") or {}).items()
        if name.startswith(VERSION_SHARE) and name.removeprefix(VERSION_SHARE).isdigit() and share
    ]
    return np.array(dots, dtype=float).reshape(-1, 3)
