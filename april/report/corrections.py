"""The report's picture of stale tokens in training: policy versions of each batch, and the effect of corrections."""

import math

import numpy as np

from april.report.drawing import AGES, BLUE, GREEN, ORANGE, RED, VIOLET, new_figure, themed, to_svg
from april.report.run_folder import RunFolder
from april.report.series import MAX_DRAWN, draw_series, finish_axes, step_numbers, values

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
        series = values(run, "learner", name)
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
