"""GDPO: the parts of a reward are normalised apart, so that none drowns in the scale of another.

An estimator with the attribute `needs_parts` is a function (parts, lengths, weights) -> advantages. `parts` has one
float64 tensor [n, P] for each group of n responses, `weights` is float64 [P], `lengths` are response tokens. This
module imports without torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.learner.losses.advantages import grpo, has_spread

if TYPE_CHECKING:
    from torch import Tensor

    from april.learner.losses.advantages import Groups


def gdpo(parts: Groups, lengths: Groups, weights: Tensor) -> Groups:
    """A_i = (a_i - mean(a)) / std(a) over all responses of the batch, where a_i = sum over k of weight_k A_k,i and A_k
    is part k normalised within its group as by `grpo`: (r_k - mean(r_k)) / std(r_k).

    "GDPO: Group reward-Decoupled Normalization Policy Optimization", arXiv 2601.05242, section 3. A part without spread
    in a group adds nothing to it; a batch without spread gets zeros.
    """
    import torch

    if not parts:
        return []
    summed = [weights @ torch.stack(grpo(list(group.T), lengths)) for group in parts]
    joined = torch.cat(summed)
    if not has_spread(joined):
        return [group.new_zeros(len(group)) for group in summed]
    return [(group - joined.mean()) / joined.std() for group in summed]


gdpo.needs_parts = True  # type: ignore[attr-defined]
