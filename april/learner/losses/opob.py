"""VCPO's baseline: rewards of a group are compared with a mean that heeds how far each response would move the policy.

An advantage estimator that says `needs_norms` is a function (rewards, log_ratios, squares) -> advantages over lists
with one float64 [n] tensor a group. Under the weights at delivery, `log_ratios` are log pi / mu of each whole response,
within ±MAX_LOG_RATIO, and `squares` those of the norm of the gradient of its log-probability. This module is read
without torch: a configuration is checked everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.learner.losses.advantages import centred

if TYPE_CHECKING:
    from torch import Tensor

    from april.learner.losses.advantages import Groups


def opob(rewards: Groups, log_ratios: Groups, squares: Groups) -> Groups:
    """r - b of the group, b = sum(w^2 |g|^2 r) / sum(w^2 |g|^2), w = pi / mu of a response, g the gradient of log pi.

    The baseline under which the importance-weighted policy gradient has the least variance. VCPO, "Stable
    Asynchrony", arXiv 2602.17616, and mit-han-lab/vcpo, recipe/fully_async_policy/staleness_utils.py. Where no response
    would move the policy, r - mean.
    """
    return [less_baseline(*group) for group in zip(rewards, log_ratios, squares, strict=True)]


def less_baseline(rewards: Tensor, log_ratios: Tensor, squares: Tensor) -> Tensor:
    weights = (2 * log_ratios).exp() * squares
    total = weights.sum()
    return centred(rewards) if total == 0 else rewards - (weights * rewards).sum() / total


opob.needs_norms = True  # type: ignore[attr-defined]
