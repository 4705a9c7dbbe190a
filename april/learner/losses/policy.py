"""Policy losses: the loss of each response token, and whether it was clipped.

Every loss is a function (logprobs, proximal_logprobs, advantages, spans, clip) -> (losses, clipped), all columns [K];
`proximal_logprobs`, without a gradient, are those of the policy around which the ratio is clipped. A loss that uses
`clip.dual` has the attribute `takes_dual_clip`. A loss whose bounds depend on the batch has the attribute
`clip_of_batch`, a function (`StaleTokens` of the batch, clip, section) -> Clip. This module imports without torch, so
that any machine can check a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from april.config.training import AlgorithmSection
from april.learner.losses.columns import Spans, bounded, probability_ratio
from april.learner.losses.corrections import StaleTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Clip bounds of the ratio pi / proximal."""

    low: float
    """Lower clip width: ratios below 1 - low are clipped; low = 1 means no lower bound."""
    high: float
    """Upper clip width: ratios above 1 + high are clipped."""
    dual: float | None = None
    """Dual clip c > 1: the loss of a token with A < 0 is at most c |A| (PPO and BAPO only); None: no dual clip."""


def ppo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """L = -min(ratio A, clip(ratio, 1 - low, 1 + high) A), ratio = pi / proximal; for A < 0 at most -dual A.

    PPO, arXiv 1707.06347, equation 7, with separate bounds as in DAPO, arXiv 2503.14476, equation 10, and the dual clip
    of arXiv 1912.09729, equation 5. Clipped tokens are those without a gradient.
    """
    return clipped_surrogate(probability_ratio(logprobs, proximal_logprobs), advantages, clip)


ppo.takes_dual_clip = True  # type: ignore[attr-defined]


def gspo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """L = -min(s A, clip(s, 1 - low, 1 + high) A) with the sequence ratio s = (pi(y) / proximal(y))^(1/|y|).

    GSPO, arXiv 2507.18071, equations 5 to 7. All tokens of a sequence have the same loss, so their sum is |y| times the
    sequence's loss.
    """
    ratio = bounded(spans.mean(logprobs - proximal_logprobs)).exp()
    return clipped_surrogate(ratio, advantages, clip)


def gspo_token(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """The loss of `gspo` with token ratios s_t = sg[s] pi_t / sg[pi_t]: the gradient flows through each token's own
    log-probability (sg: stop gradient).

    GSPO-token, arXiv 2507.18071, equations 13 and 14; equal to `gspo` if all tokens of a sequence have one advantage.
    """
    current = logprobs.detach()
    ratio = (bounded(spans.mean(current - proximal_logprobs)) + logprobs - current).exp()
    return clipped_surrogate(ratio, advantages, clip)


def cispo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """L = -sg[clip(ratio, 1 - low, 1 + high)] A log pi (sg: stop gradient).

    CISPO, "MiniMax-M1", arXiv 2506.13585, equation 4. Every token keeps its gradient; clipped tokens are those whose
    weight was clipped.
    """
    ratio = probability_ratio(logprobs.detach(), proximal_logprobs)
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -weight * advantages * logprobs, weight != ratio


def cross_entropy(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """L = -A log pi, without a ratio: with A = 1 the cross-entropy of supervised training, with another advantage the
    policy gradient of REINFORCE (Williams 1992). No token is clipped."""
    return -advantages * logprobs, advantages.new_zeros(advantages.shape).bool()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate loss of any ratio, and whether a bound removed the gradient; all [K]."""
    surrogate = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    losses, clipped = -surrogate.minimum(bounded), bounded < surrogate
    if clip.dual is None:
        return losses, clipped
    upper_bound = -clip.dual * advantages
    capped = (advantages < 0) & (losses > upper_bound)
    return upper_bound.where(capped, losses), clipped | capped


# --- BAPO -------------------------------------------------------------------------------------------------------------


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
        """Whether P < bapo_target N (see `balanced_clip`) if ratios are clipped below `lower` and above `upper`."""
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
