"""VCPO's optimal baseline: the group's mean reward, weighted by the squared gradient norm of each response.

An advantage estimator with the attribute `needs_norms` is a function (rewards, log_ratios, squares) -> advantages over
lists with one float64 [n] tensor per group of n responses. Under the weights at delivery, `log_ratios` are log(pi / mu)
of each whole response, within ±MAX_LOG_RATIO, and `squares` the squared norm of the gradient of its log-probability.
This module imports without torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.learner.losses.advantages import centred

if TYPE_CHECKING:
    from torch import Tensor

    from april.learner.losses.advantages import Groups


def opob(rewards: Groups, log_ratios: Groups, squares: Groups) -> Groups:
    """A_i = r_i - b within the group, b = sum_i(w_i^2 |g_i|^2 r_i) / sum_i(w_i^2 |g_i|^2).

    w_i = pi / mu of response i, g_i the gradient of its log pi. The baseline that minimises the variance of the
    importance-weighted policy gradient: VCPO, "Stable Asynchrony", arXiv 2602.17616, and mit-han-lab/vcpo,
    recipe/fully_async_policy/staleness_utils.py. If all gradients are zero, b is the plain mean.
    """
    return [minus_baseline(*group) for group in zip(rewards, log_ratios, squares, strict=True)]


def minus_baseline(rewards: Tensor, log_ratios: Tensor, squares: Tensor) -> Tensor:
    weights = (2 * log_ratios).exp() * squares
    total = weights.sum()
    return centred(rewards) if total == 0 else rewards - (weights * rewards).sum() / total


opob.needs_norms = True  # type: ignore[attr-defined]
