"""BAPO: PPO's loss with bounds that are moved, in each batch, until what is good counts as much as what is bad."""

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
    """`ppo` within the bounds that `balanced` has found for the batch."""
    return clipped_surrogate(probability_ratio(logprobs, proximal_logprobs), advantages, clip)


def balanced(tokens: StaleTokens, clip: Clip, section: AlgorithmSection) -> Clip:
    """Bounds of the ratio from 1 - low and 1 + high on: the lower one is raised first, then the upper one, a step at a
    time, until the contributions of tokens with an advantage above 0 reach the target, or both are at their highest.

    "BAPO", arXiv 2510.18927, as the authors' recipe does it (WooooDyy/BAPO, recipe/bapo/policy_loss.py). A contribution
    is ratio times advantage, the ratio below the upper bound where the advantage is above 0 and above the lower one
    where it is not.
    """
    ratio = probability_ratio(tokens.logprobs, tokens.proximal_logprobs).double()

    def short(lower: float, upper: float) -> bool:
        """That what is good counts too little."""
        good = (ratio.clamp(max=upper) * tokens.advantages).clamp(min=0).sum()
        bad = (ratio.clamp(min=lower) * -tokens.advantages).clamp(min=0).sum()
        return tokens.ranks.total(good - section.bapo_target * bad).item() < 0

    lower, upper = 1 - clip.low, 1 + clip.high
    while lower < section.bapo_lower and short(lower, upper):
        lower = min(lower + section.bapo_lower_step, section.bapo_lower)
    while upper < section.bapo_upper and short(lower, upper):
        upper = min(upper + section.bapo_upper_step, section.bapo_upper)
    return replace(clip, low=1 - lower, high=upper - 1)


bapo.takes_dual_clip = True  # type: ignore[attr-defined]
bapo.clip_of_batch = balanced  # type: ignore[attr-defined]
