"""DPPO: a trust region on the change of a token's probability instead of its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.corrections import StaleTokens

if TYPE_CHECKING:
    from torch import Tensor


def dppo_tv(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """Mask, [K]: 0 where the step would move a probability out of the trust region around mu, 1 elsewhere. That is
    pi - mu > dppo_rise for A > 0, and mu - pi > dppo_fall for A <= 0.

    The binary approximation of the total variation distance, "Rethinking the Trust Region in LLM Reinforcement
    Learning", arXiv 2602.04879, as in verl's `loss_mode = "dppo_tv"`. The paper's importance ratio, truncated at a
    large value, is the correction `truncated`.
    """
    change, positive = tokens.logprobs.exp() - tokens.behaviour_logprobs.exp(), tokens.advantages > 0
    kept = (positive & (change <= section.dppo_rise)) | (~positive & (change >= -section.dppo_fall))
    return kept.to(change.dtype)
