"""VESPO: whole responses weighed by a soft, closed-form function of their ratio, which falls on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.columns import bounded
from april.learner.losses.corrections import StaleTokens, weighing

if TYPE_CHECKING:
    from torch import Tensor


@weighing
def vespo(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """exp(lambda) w^k exp(-lambda w) of the product w of a response's ratios, the same for all its tokens.

    It is 1 at w = 1, highest at w = k / lambda, and falls to 0 for small and for large w. `k` and `lambda` go by the
    sign of the advantage. "VESPO", arXiv 2602.10693, its kernel phi as the authors' recipe and TRL's `loss_type =
    "vespo"` compute it. Around the policy at hand, with `algorithm.loss = "cispo"`, the loss is theirs, too.
    """
    good = (tokens.advantages >= 0).to(tokens.from_behaviour.dtype)
    k = good * section.vespo_k_positive + (1 - good) * section.vespo_k_negative
    decay = good * section.vespo_lambda_positive + (1 - good) * section.vespo_lambda_negative
    log_w = bounded(tokens.spans.sum(tokens.from_behaviour))
    return (decay + k * log_w - decay * log_w.exp()).exp()
