"""BAPO: PPO's clipped loss whose bounds are moved, batch by batch, until positive advantages contribute enough."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.columns import Spans, probability_ratio
from april.learner.losses.corrections import StaleTokens
from april.learner.losses.policy import Clip, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor


def bapo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """The loss of `ppo`, [K], with the bounds that `balanced_clip` has chosen for the batch."""
    return clipped_surrogate(probability_ratio(logprobs, proximal_logprobs), advantages, clip)


def balanced_clip(tokens: StaleTokens, clip: Clip, section: AlgorithmSection) -> Clip:
    """Clip bounds of the ratio pi / proximal for one batch, found by search from 1 - low and 1 + high.

    First the lower bound is raised step by step, then the upper one, until P >= bapo_target N or both bounds are at
    their maximum. P sums min(ratio, upper) A over the tokens with A > 0, N sums max(ratio, lower) |A| over A < 0.

    "BAPO", arXiv 2510.18927, as in the authors' code (WooooDyy/BAPO, recipe/bapo/policy_loss.py). Collective.
    """
    ratio = probability_ratio(tokens.logprobs, tokens.proximal_logprobs).double()

    def below_target(lower: float, upper: float) -> bool:
        """Whether positive advantages contribute less than their target under these bounds."""
        positive = (ratio.clamp(max=upper) * tokens.advantages).clamp(min=0).sum()
        negative = (ratio.clamp(min=lower) * -tokens.advantages).clamp(min=0).sum()
        return tokens.ranks.total(positive - section.bapo_target * negative).item() < 0

    lower, upper = 1 - clip.low, 1 + clip.high
    while lower < section.bapo_lower and below_target(lower, upper):
        lower = min(lower + section.bapo_lower_step, section.bapo_lower)
    while upper < section.bapo_upper and below_target(lower, upper):
        upper = min(upper + section.bapo_upper_step, section.bapo_upper)
    return replace(clip, low=1 - lower, high=upper - 1)


bapo.takes_dual_clip = True  # type: ignore[attr-defined]
bapo.clip_of_batch = balanced_clip  # type: ignore[attr-defined]
