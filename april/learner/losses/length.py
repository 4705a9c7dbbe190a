"""Length penalties that compare a response with those of its group.

A penalty is a function (rewards, lengths) -> what is added to the rewards, times `algorithm.length_coef`, before their
advantages are made: lists with one float64 tensor [n] for each group of n responses; `lengths` are response tokens. A
response is right if its reward is above 0. This module imports without torch, so that any machine can check a
configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from april.learner.losses.advantages import Groups


def kimi(rewards: Groups, lengths: Groups) -> Groups:
    """0.5 - (length - shortest) / (longest - shortest) of the group for a right response, and that or 0, whichever is
    less, for a wrong one; 0 where all are of one length.

    "Kimi k1.5", arXiv 2501.12599, section 2.3.3.
    """
    return [by_rank(*group) for group in zip(rewards, lengths, strict=True)]


def by_rank(rewards: Tensor, lengths: Tensor) -> Tensor:
    if not len(lengths) or lengths.max() == lengths.min():
        return rewards.new_zeros(len(rewards))
    share = 0.5 - (lengths - lengths.min()) / (lengths.max() - lengths.min())
    return share.where(rewards > 0, share.clamp(max=0.0))


def alp(rewards: Groups, lengths: Groups) -> Groups:
    """-length max(p, 1 / n), p the share of the n responses that are right: each token costs more where the prompt is
    easy.

    "Just Enough Thinking", arXiv 2506.05256, its adaptive length penalty.
    """
    return [
        -tokens * max(float((group > 0).double().mean()), 1 / len(group)) if len(group) else group
        for group, tokens in zip(rewards, lengths, strict=True)
    ]
