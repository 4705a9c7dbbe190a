"""Advantages from the rewards of a batch, group by group, in float64.

Every estimator is a function (rewards, lengths) -> advantages over lists with one float64 [n] tensor a group;
`lengths` are response tokens. A group (for the batch-wide estimators: a batch) without spread
(`april.filters.spread`) says nothing: zeros. `advantages` takes rounding out of what they give. This module is read
without torch: a configuration is checked everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.filters import spread
from april.learner.losses import ADVANTAGES

if TYPE_CHECKING:
    from torch import Tensor

    Groups = list[Tensor]

ROUNDING = 1e-9
"""smaller advantages are 0: of the rewards 0.1, 0.2 and 0.3 the second is as good as the mean"""


def has_spread(rewards: Tensor) -> bool:
    return spread.has_spread(rewards.tolist())


def centred(rewards: Tensor) -> Tensor:
    """r - mean(r) of one group; exactly zero without spread."""
    return rewards - rewards.mean() if has_spread(rewards) else rewards.new_zeros(len(rewards))


def grpo(rewards: Groups, lengths: Groups) -> Groups:
    """(r - mean) / std of the group, with the sample (n - 1) standard deviation.

    "DeepSeekMath", arXiv 2402.03300, section 4.1.2.
    """
    return [centred(group) / group.std() if has_spread(group) else group.new_zeros(len(group)) for group in rewards]


def dr_grpo(rewards: Groups, lengths: Groups) -> Groups:
    """r - mean of the group, so that no group weighs more for having little spread.

    "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2.
    """
    return [centred(group) for group in rewards]


def rloo(rewards: Groups, lengths: Groups) -> Groups:
    """r less the mean of the *other* samples, n / (n - 1) (r - mean).

    "Back to Basics", arXiv 2402.14740, equation 4.
    """
    return [centred(group) * len(group) / max(1, len(group) - 1) for group in rewards]


def reinforce_pp(rewards: Groups, lengths: Groups) -> Groups:
    """(r - mean) / std over all response tokens of the batch. "REINFORCE++", arXiv 2501.03262, section 3."""
    return whitened(rewards, lengths)


def reinforce_pp_baseline(rewards: Groups, lengths: Groups) -> Groups:
    """r - mean of the group, then (a - mean) / std over all response tokens of the batch.

    "REINFORCE++", arXiv 2501.03262, the form with a group baseline. The batch mean moves a group without spread
    a little off zero wherever longer responses are better or worse than short ones.
    """
    return whitened([centred(group) for group in rewards], lengths)


def whitened(values: Groups, lengths: Groups) -> Groups:
    """(v - mean) / std, each value counted as often as its response has tokens; std with the sample correction."""
    import torch

    if not values:
        return []
    joined, weights = torch.cat(values), torch.cat(lengths)
    seen = joined[weights > 0]
    if not has_spread(seen):
        return [group.new_zeros(len(group)) for group in values]
    tokens = weights.sum()
    mean = (joined * weights).sum() / tokens
    variance = ((joined - mean).square() * weights).sum() / (tokens - 1)
    return [(group - mean) / variance.sqrt() for group in values]


def advantages(estimator: str, rewards: Groups, lengths: Groups) -> Groups:
    """What `estimator` gives, and exactly 0 where that is rounding."""
    return [group.masked_fill(group.abs() < ROUNDING, 0.0) for group in ADVANTAGES.find(estimator)(rewards, lengths)]
