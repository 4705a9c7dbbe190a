"""The divergence of a policy's head from a teacher, over the whole vocabulary or over the teacher's top k ids.

It is computed in pieces of a few targets, whose distributions are made of hidden states in the forward pass and again
in the backward pass, so that those of all targets never exist at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from april.learner.head import LogitChunks, add_matmul, slope_of
from april.learner.packing import NEVER, HeadInputs, MicroBatch

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Function (teacher's log-probabilities [n, V], the policy's [n, V]) -> divergence of each row [n]."""
PIECE_LOGITS, ACCELERATOR_PIECE_LOGITS = 2**22, 2**25
"""Most logits that the divergence computes at a time, on a CPU and on an accelerator. Some eight tensors of this size
exist at once, so they are a quarter of LOGITS_PER_CHUNK and LOGITS_PER_ACCELERATOR_CHUNK in `april.learner.head`."""


def divergence_from(teacher: HeadInputs, divergence: Divergence, policy: HeadInputs) -> Tensor:
    """Divergence at each of K targets, float32 [K], differentiable in the policy's hidden states and head, with one
    backward pass a call. Ids that the policy does not have are left out of the teacher's distribution."""
    return HeadDivergence.apply(policy.hidden, policy.weight, policy.divisor, policy.cap, teacher, divergence)


class TopIds(NamedTuple):
    """The k ids that a teacher finds most likely in the place of each of K targets."""

    ids: Tensor
    """Token ids, int64 [K, k]."""
    logprobs: Tensor
    """Log-probabilities of the same ids under the teacher, [K, k]."""


@dataclass(frozen=True, eq=False)
class TopKDivergence:
    """Function (inputs of the policy's head for K targets) -> divergence of the policy from a teacher at each, float32
    [K], over the k ids that the teacher finds most likely."""

    pairs: Tensor
    """Pairs (id, log-probability under the teacher) of K targets, float [K, k, 2]; NaN where a target has fewer
    than k. Such pairs, and those of ids that the policy does not have, count as ids of probability 0."""
    divergence: Divergence

    @classmethod
    def added(cls, micro: MicroBatch, pairs: Tensor | None, divergence: Divergence | None) -> MicroBatch:
        """The micro-batch with a `TopKDivergence` from `pairs` as its divergence; unchanged if there are no pairs or no
        divergence."""
        return micro if pairs is None or divergence is None else replace(micro, divergence=cls(pairs, divergence))

    def part(self, targets: slice) -> "TopKDivergence":
        """The divergence of some of the targets."""
        return replace(self, pairs=self.pairs[targets])

    def __call__(self, policy: HeadInputs) -> Tensor:
        ids, logprobs = self.pairs.unbind(-1)
        known = (ids >= 0) & (ids < len(policy.weight))
        top = TopIds(ids.where(known, 0.0).long(), logprobs.where(known, NEVER))
        return HeadDivergence.apply(policy.hidden, policy.weight, policy.divisor, policy.cap, top, self.divergence)


class HeadDivergence(torch.autograd.Function):
    """Autograd function of `divergence_from`; the backward pass computes each piece again, and differentiates it."""

    @staticmethod
    def forward(ctx, hidden, weight, divisor, cap, teacher, divergence):
        found = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows, theirs, ids, ours in pieces(HeadInputs(hidden, weight, divisor, cap), teacher):
            found[rows] = divergence(theirs, logprobs_at(ours, ids))
        ctx.save_for_backward(hidden, weight)
        ctx.divisor, ctx.cap, ctx.teacher, ctx.divergence = divisor, cap, teacher, divergence
        return found

    @staticmethod
    def backward(ctx, gradients):
        hidden, weight = ctx.saved_tensors
        hidden_gradient, weight_gradient = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight, dtype=gradients.dtype)
        for rows, theirs, ids, ours in pieces(HeadInputs(hidden, weight, ctx.divisor, ctx.cap), ctx.teacher):
            logits = ours.detach().requires_grad_()
            with torch.enable_grad():
                found = ctx.divergence(theirs, logprobs_at(logits, ids))
                (gradient,) = torch.autograd.grad(found, logits, gradients[rows])
            if ctx.cap is not None:
                gradient = gradient * slope_of(ours, ctx.cap)
            gradient, outputs = (gradient / ctx.divisor).to(hidden.dtype), hidden_gradient[rows]
            torch.mm(gradient, weight, out=outputs)
            if weight_gradient is not None:
                add_matmul(weight_gradient, gradient.T, hidden[rows])
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None


def logprobs_at(logits: Tensor, ids: Tensor | None) -> Tensor:
    """Log-probabilities from `logits` [n, V]: [n, k], of the token ids `ids`, int64 [n, k], of each row; None: [n, V],
    of all ids."""
    logprobs = logits.log_softmax(-1)
    return logprobs if ids is None else logprobs.gather(1, ids)


def pieces(policy: HeadInputs, teacher: HeadInputs | TopIds) -> Iterator[tuple[slice, Tensor, Tensor | None, Tensor]]:
    """Yield for each piece of the targets (their slice, the teacher's log-probabilities, token ids to which these
    belong, the policy's logits). The ids are None if the teacher's log-probabilities are those of all ids. The next
    piece overwrites the buffer of the logits."""
    ids = len(policy.weight)
    count = max(1, (PIECE_LOGITS if policy.hidden.device.type == "cpu" else ACCELERATOR_PIECE_LOGITS) // ids)
    ours = LogitChunks(policy.hidden, policy.weight, policy.divisor, count, cap=policy.cap)
    if isinstance(teacher, TopIds):
        return ((rows, teacher.logprobs[rows], teacher.ids[rows], own) for rows, own in ours)
    theirs = LogitChunks(teacher.hidden, teacher.weight[:ids], teacher.divisor, count, cap=teacher.cap)
    both = zip(theirs, ours, strict=True)
    return ((rows, others.log_softmax(-1), None, own) for (rows, others), (_, own) in both)
