"""The divergence of a policy's head from a teacher's, over the whole vocabulary, by pieces: the distributions of both
are made from hidden states, forth and back, and never held whole."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from april.learner.head import LogitChunks, add_matmul, slope_of
from april.learner.packing import HeadInputs

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Function (teacher's log-probabilities [n, V], the policy's [n, V]) -> divergence of each row [n]."""
LOGITS, ACCELERATOR_LOGITS = 2**22, 2**25
"""Most logits of a piece on a CPU, and on an accelerator: a quarter of the head's own, since some eight tensors of this
size exist at a time."""


def divergence_from(teacher: HeadInputs, divergence: Divergence, policy: HeadInputs) -> Tensor:
    """Divergence at each of K targets, float32 [K], differentiable in the policy's hidden states and head, with one
    backward pass a call. Ids that the policy does not have are left out of the teacher's distribution."""
    return HeadDivergence.apply(policy.hidden, policy.weight, policy.divisor, policy.cap, teacher, divergence)


class HeadDivergence(torch.autograd.Function):
    """Autograd function of `divergence_from`; the backward pass computes each piece again, and differentiates it."""

    @staticmethod
    def forward(ctx, hidden, weight, divisor, cap, teacher, divergence):
        found = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows, theirs, ours in pieces(HeadInputs(hidden, weight, divisor, cap), teacher):
            found[rows] = divergence(theirs.log_softmax(-1), ours.log_softmax(-1))
        ctx.save_for_backward(hidden, weight)
        ctx.divisor, ctx.cap, ctx.teacher, ctx.divergence = divisor, cap, teacher, divergence
        return found

    @staticmethod
    def backward(ctx, gradients):
        hidden, weight = ctx.saved_tensors
        hidden_gradient, weight_gradient = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight, dtype=gradients.dtype)
        for rows, theirs, ours in pieces(HeadInputs(hidden, weight, ctx.divisor, ctx.cap), ctx.teacher):
            logits = ours.detach().requires_grad_()
            with torch.enable_grad():
                found = ctx.divergence(theirs.log_softmax(-1), logits.log_softmax(-1))
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


def pieces(policy: HeadInputs, teacher: HeadInputs) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, the teacher's logits, the policy's logits) of each piece, in buffers that the next one overwrites."""
    ids = len(policy.weight)
    count = max(1, (LOGITS if policy.hidden.device.type == "cpu" else ACCELERATOR_LOGITS) // ids)
    theirs = LogitChunks(teacher.hidden, teacher.weight[:ids], teacher.divisor, count, cap=teacher.cap)
    ours = LogitChunks(policy.hidden, policy.weight, policy.divisor, count, cap=policy.cap)
    return ((rows, others, own) for (rows, others), (_, own) in zip(theirs, ours, strict=True))
