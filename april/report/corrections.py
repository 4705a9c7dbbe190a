"""The picture of stale tokens as the learner sees them: which versions a batch came from, and what corrections left."""

import numpy as np

from april.report.drawing import AGES, BLUE, GREEN, ORANGE, RED, VIOLET, new_figure, themed, to_svg
from april.report.pictures import draw_series, legend, step_numbers, whole_steps
from april.report.run_folder import Run, dig

SHARES = (
    ("ess", "effective: ratios", BLUE),
    ("weight_ess", "effective: weights", GREEN),
    ("off_policy_share", "off-policy", VIOLET),
    ("clip_fraction", "clipped", ORANGE),
    ("truncated_fraction", "truncated", AGES[2]),
    ("mask_fraction", "masked", RED),
)
VERSION_SHARE = "version_share_"
LARGEST_DOT = 60.0
"""area of the dot of a version that has sampled the whole batch (points squared)"""


@themed
def corrections_picture(run: Run) -> str | None:
    """Above, shares of the trained tokens; below, a dot for each version that has sampled a part of a batch."""
    dots = version_dots(run)
    if not len(dots):
        return None
    figure, (above, below) = new_figure(4.2, panels=2)
    steps = step_numbers(run)
    for name, label, color in SHARES:
        series = np.array([dig(step, "learner", name) for step in run.steps], dtype=float)
        if np.isfinite(series).any():
            draw_series(above, steps, series, color, label)
    above.set(ylabel="share of tokens", ylim=(-0.03, 1.05))
    legend(above)
    step, version, share = dots.T
    below.scatter(step, version, s=LARGEST_DOT * share, color=BLUE, lw=0)
    below.set(xlabel="step", ylabel="policy version")
    for axes in (above, below):
        whole_steps(axes)
    return to_svg(figure, "effective sample share, clipped, truncated and masked tokens, and policy versions per step")


def version_dots(run: Run) -> np.ndarray:
    """(step, version's step, share of the batch's tokens) of every version that is told apart; float64 [n, 3]."""
    dots = [
        (step["step"], int(name.removeprefix(VERSION_SHARE)), share)
        for step in run.steps
        for name, share in (step.get("learner") or {}).items()
        if name.startswith(VERSION_SHARE) and name.removeprefix(VERSION_SHARE).isdigit() and share
    ]
    return np.array(dots, dtype=float).reshape(-1, 3)
