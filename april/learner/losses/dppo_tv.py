"""DPPO: a trust region by how far a token's probability has moved, in place of its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.corrections import StaleTokens

if TYPE_CHECKING:
    from torch import Tensor


def dppo_tv(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """0 where the step would take a probability farther from mu than it may go: with an advantage above 0 where
    pi - mu > rise, otherwise where mu - pi > fall; 1 elsewhere.

    The binary approximation of the total variation, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv
    2602.04879, as verl's `loss_mode = "dppo_tv"` computes it. Its ratio, truncated at a large value, is `truncated`.
    """
    moved, good = tokens.logprobs.exp() - tokens.behaviour_logprobs.exp(), tokens.advantages > 0
    return ((good & (moved <= section.dppo_rise)) | (~good & (moved >= -section.dppo_fall))).to(moved.dtype)
