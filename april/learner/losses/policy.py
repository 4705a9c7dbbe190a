"""Policy losses: what is minimised for each response token, and which tokens the clip has touched.

Every loss is a function (logprobs, proximal_logprobs, advantages, spans, clip) -> (losses, clipped), all [K];
`proximal_logprobs` are those of the policy around which the ratio is clipped, without a gradient. One that heeds
`clip.dual` says so (`takes_dual_clip`). One whose bounds go by the batch has `clip_of_batch`, a function (tokens, clip,
section) -> Clip of all its tokens (`StaleTokens`). This module is read without torch: a configuration is checked
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from april.learner.losses.columns import Spans, bounded, probability_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Clip:
    low: float
    """ratios are clipped below 1 - low; 1 is no lower bound"""
    high: float
    """and above 1 + high"""
    dual: float | None = None
    """a negative advantage weighs at most this many times itself (PPO only)"""


def ppo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), for A < 0 at most -dual A; clipped: no gradient is left.

    PPO, arXiv 1707.06347, equation 7, with the bounds apart as in DAPO, arXiv 2503.14476, equation 10, and the
    dual clip of arXiv 1912.09729, equation 5.
    """
    return clipped_surrogate(probability_ratio(logprobs, proximal_logprobs), advantages, clip)


ppo.takes_dual_clip = True  # type: ignore[attr-defined]


def gspo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of the sequence ratio s = (pi(y) / proximal(y))^(1/|y|), the same for all its tokens.

    GSPO, arXiv 2507.18071, equations 5 to 7. Its sum over a sequence's tokens is |y| times the sequence's loss.
    """
    ratio = bounded(spans.mean(logprobs - proximal_logprobs)).exp()
    return clipped_surrogate(ratio, advantages, clip)


def gspo_token(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """As `gspo`, with the gradient flowing through each token's own log-probability: s -> sg[s] pi / sg[pi].

    GSPO-token, arXiv 2507.18071, equations 13 and 14; equal to `gspo` where a sequence has one advantage.
    """
    current = logprobs.detach()
    ratio = (bounded(spans.mean(current - proximal_logprobs)) + logprobs - current).exp()
    return clipped_surrogate(ratio, advantages, clip)


def cispo(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, spans: Spans, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-sg[clip(ratio, 1 - low, 1 + high)] A log pi: the weight is clipped, the gradient never; clipped: it was.

    CISPO, "MiniMax-M1", arXiv 2506.13585, equation 4.
    """
    ratio = probability_ratio(logprobs.detach(), proximal_logprobs)
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -weight * advantages * logprobs, weight != ratio


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    surrogate = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    losses, clipped = -surrogate.minimum(bounded), bounded < surrogate
    if clip.dual is None:
        return losses, clipped
    most = -clip.dual * advantages
    capped = (advantages < 0) & (losses > most)
    return most.where(capped, losses), clipped | capped
