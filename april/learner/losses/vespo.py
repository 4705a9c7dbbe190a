"""VESPO: weights whole responses by a soft closed-form kernel of their importance ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.columns import bounded
from april.learner.losses.corrections import StaleTokens, weighing

if TYPE_CHECKING:
    from torch import Tensor


@weighing
def vespo(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """phi(w) = exp(lambda) w^k exp(-lambda w), w the product of the response's ratios proximal / mu; [K], the same for
    all tokens of a response.

    phi is 1 at w = 1, highest at w = k / lambda, and falls to 0 for small and for large w. `k` and `lambda` depend on
    the sign of the advantage. "VESPO", arXiv 2602.10693, the kernel as in the authors' code and TRL's `loss_type =
    "vespo"`. With `algorithm.proximal = "recomputed"` and `algorithm.loss = "cispo"` the loss is the paper's too.
    """
    positive = (tokens.advantages >= 0).to(tokens.proximal_log_ratio.dtype)
    k = positive * section.vespo_k_positive + (1 - positive) * section.vespo_k_negative
    decay = positive * section.vespo_lambda_positive + (1 - positive) * section.vespo_lambda_negative
    log_w = bounded(tokens.spans.sum(tokens.proximal_log_ratio))
    return (decay + k * log_w - decay * log_w.exp()).exp()
