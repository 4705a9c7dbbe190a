"""Log-probabilities and entropies where each rank has some rows of the head: no rank ever has all logits of a token."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from april.learner.model import LOGITS_PER_CHUNK


class Summed(torch.autograd.Function):
    """The sum over the ranks. What is made of it is the same on all, so the gradient is each one's as it is."""

    @staticmethod
    def forward(ctx, values, group):
        summed = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Shared(torch.autograd.Function):
    """As it is, of which each rank makes something of its own: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def score_tokens(
    hidden: Tensor, weight: Tensor, first: int, targets: Tensor, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) under softmax(hidden W^T / temperature), float32 [K] each.

    hidden [K, D] and targets int64 [K] are the same on all ranks of `group`; weight [V / ranks, D] has the rows of W
    from `first` on. At most `LOGITS_PER_CHUNK` logits exist at a time on a rank; of several chunks they are computed
    again in the backward pass. Collective, in both passes.
    """
    rows = max(1, LOGITS_PER_CHUNK // len(weight))
    if len(hidden) <= rows:
        return score_rows(hidden, weight, first, targets, temperature, group)
    chunks = [
        checkpoint(score_rows, *each, use_reentrant=False)
        for start in range(0, len(hidden), rows)
        for each in [(hidden[start : start + rows], weight, first, targets[start : start + rows], temperature, group)]
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score_rows(
    hidden: Tensor, weight: Tensor, first: int, targets: Tensor, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    logits = Shared.apply(hidden.float(), group) @ weight.float().T / temperature
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    normaliser = largest + Summed.apply((logits - largest[:, None]).exp().sum(1), group).log()
    places = targets - first
    here = (places >= 0) & (places < len(weight))
    own = logits.gather(1, places.clamp(0, len(weight) - 1)[:, None])[:, 0]
    logprobs = Summed.apply(own.where(here, 0.0), group) - normaliser
    log_p = logits - Shared.apply(normaliser, group)[:, None]
    entropies = -Summed.apply((log_p.exp() * log_p).sum(1), group)
    return logprobs, entropies
