"""A teacher held by the learner: a frozen model, sharded like the policy, that gives each token a distribution.

teacher = HeldTeacher.of(config, backend, divergence)   # None if the configuration has none
backend.backward(teacher.shown(micros), loss)           # the policy returns the divergence from it as a third column

The distributions of both are made from hidden states by pieces, forth and back, and never held whole.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from april.config import Config
from april.config.teachers import held_teacher
from april.learner import performance
from april.learner.backends.backend import Backend
from april.learner.batch import TrainSample
from april.learner.head import LogitChunks, add_matmul, slope_of
from april.learner.loading import ModelError
from april.learner.packing import HeadInputs, MicroBatch, input_tokens
from april.learner.performance import Seconds
from april.util.pulse import MAIN

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Function (teacher's log-probabilities [n, V], the policy's [n, V]) -> divergence of each row [n]."""
LOGITS, ACCELERATOR_LOGITS = 2**22, 2**25
"""Most logits of a piece on a CPU, and on an accelerator: a quarter of the head's own, since some eight tensors of this
size exist at a time."""


class HeldTeacher:
    """A frozen model, and the divergence from it."""

    def __init__(self, model: nn.Module, divergence: Divergence):
        """`model` returns `HeadInputs` of a micro-batch where it is asked for them."""
        self.model, self.divergence = model, divergence
        self.cost = performance.forward_cost(model.lm)

    @classmethod
    def of(cls, config: Config, backend: Backend, divergence: Divergence | None) -> Self | None:
        """The configured teacher, None if the learner holds none. Collective. Raises ModelError for one with fewer ids
        than the policy."""
        section = held_teacher(config)
        if section is None or divergence is None:
            return None
        model = backend.teacher(section.path)
        ours, theirs = (lm.get_output_embeddings().weight.shape[0] for lm in (backend.lm, model.lm))
        if theirs < ours:
            raise ModelError(
                f"{section.path}: its head has {theirs} ids and the policy's {ours}, so that it says nothing of the "
                f"last {ours - theirs}; give a teacher with at least as many"
            )
        return cls(model, divergence)

    def operations(self, samples: Iterable[TrainSample]) -> float:
        """Floating-point operations of a pass over samples."""
        return sum(self.cost.of(input_tokens(sample), sample.sampled_tokens) for sample in samples)

    def shown(self, micros: Iterable[MicroBatch], seconds: Seconds = performance.untimed) -> Iterator[MicroBatch]:
        """`micros`, each with the divergence from the teacher, whose pass comes just before. Collective."""
        for micro in micros:
            MAIN.again()
            with seconds("teacher_s"), torch.no_grad():
                states = self.model(micro, inputs_alone=True)
            yield replace(micro, divergence=partial(divergence_from, states, self.divergence))


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
