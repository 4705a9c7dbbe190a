"""Log-probabilities and entropies with a vocabulary-parallel head: no rank ever holds all logits of a token."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from april.learner.model import LOGITS_PER_CHUNK


class ReduceFromRanks(torch.autograd.Function):
    """Forward: sum over the ranks. Backward: identity, since all ranks use the sum in the same way."""

    @staticmethod
    def forward(ctx, values, group):
        summed = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class CopyToRanks(torch.autograd.Function):
    """Forward: identity. Backward: sum over the ranks, since each rank uses the value in its own way."""

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
    from `first` on. At most `LOGITS_PER_CHUNK` logits exist at a time on a rank; with several chunks the backward pass
    recomputes them. Collective in both passes.
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
    """`score_tokens` of one chunk of rows."""
    logits = CopyToRanks.apply(hidden.float(), group) @ weight.float().T / temperature
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    normaliser = largest + ReduceFromRanks.apply((logits - largest[:, None]).exp().sum(1), group).log()
    rows = targets - first
    is_local = (rows >= 0) & (rows < len(weight))
    own = logits.gather(1, rows.clamp(0, len(weight) - 1)[:, None])[:, 0]
    logprobs = ReduceFromRanks.apply(own.where(is_local, 0.0), group) - normaliser
    log_p = logits - CopyToRanks.apply(normaliser, group)[:, None]
    entropies = -ReduceFromRanks.apply((log_p.exp() * log_p).sum(1), group)
    return logprobs, entropies
