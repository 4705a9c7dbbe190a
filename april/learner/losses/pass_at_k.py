"""Advantages of pass@k: a response is judged by the groups of k responses that it would be in.

This module imports without torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from april.learner.losses.advantages import Groups


def pass_at_k(rewards: Groups, lengths: Groups, *, pass_k: int) -> Groups:
    """Of n responses w are wrong, those with a reward of at most 0. Each set of k responses has the reward 1 if one of
    them is right, and 0 otherwise: with the mean R = 1 - C(w, k) / C(n, k) and the deviation s = sqrt(R (1 - R)),

        A = (1 - R) / s                                   of a right response,
        A = (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / s   of a wrong one.

    "Pass@k Training for Adaptively Balancing Exploration and Exploitation", arXiv 2508.10751, its analytical
    derivation. A group all of whose sets are right, or none, gets zeros. One of fewer than k responses is one set.
    """
    return [of_group(group, min(pass_k, len(group))) for group in rewards]


def of_group(rewards: Tensor, k: int) -> Tensor:
    right = rewards > 0
    n, wrong = len(rewards), len(rewards) - int(right.sum())
    lost = comb(wrong, k) / comb(n, k)
    if not 0 < lost < 1:
        return rewards.new_zeros(n)
    deviation = (lost * (1 - lost)) ** 0.5
    of_wrong = lost - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
    return rewards.new_full((n,), lost / deviation).where(right, of_wrong / deviation)
