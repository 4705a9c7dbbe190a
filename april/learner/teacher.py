"""A teacher in the learner, which gives each token a distribution: a frozen model, sharded like the policy, or the
policy itself under a prompt with a hint.

teacher = Teacher.of(config, backend)                   # None if the configuration has none
micros = teacher.shown((micro, divergence) for micro in micros)
backend.backward(micros, loss)                          # the policy returns the divergence from it as a third column

The divergence is over the whole vocabulary. It is computed in pieces of a few targets, whose distributions are made of
hidden states in the forward pass and again in the backward pass, so that those of all targets never exist at once.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from april.config import Config
from april.config.algorithms import named
from april.config.teachers import held_teacher
from april.learner.backends.backend import Backend
from april.learner.batch import TrainSample
from april.learner.head import LogitChunks, add_matmul, slope_of
from april.learner.loading import ModelError
from april.learner.packing import HeadInputs, MicroBatch, seen_by_teacher
from april.learner.performance import Cost, Seconds, forward_cost, untimed
from april.util.pulse import MAIN

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Function (teacher's log-probabilities [n, V], the policy's [n, V]) -> divergence of each row [n]."""
PIECE_LOGITS, ACCELERATOR_PIECE_LOGITS = 2**22, 2**25
"""Most logits that the divergence computes at a time, on a CPU and on an accelerator: a quarter of the head's own,
since some eight tensors of this size exist at once."""


class Teacher:
    """A model that the policy is compared with."""

    def __init__(self, model: nn.Module, cost: Cost, by_hint: bool = False):
        """`model` returns `HeadInputs` of a micro-batch where it is asked for them; `cost` is that of its passes;
        `by_hint`: it is the policy, which teaches only where it sees a hint."""
        self.model, self.cost, self.by_hint = model, cost, by_hint

    @classmethod
    def of(cls, config: Config, backend: Backend) -> Self | None:
        """The configured teacher, None if the learner has none. Collective. Raises ModelError for one with fewer ids
        than the policy."""
        section = held_teacher(config)
        if not named(config, "divergence"):
            return None
        if section is None:
            return cls(backend.policy, backend.cost, by_hint=True)
        model = backend.teacher(section.path)
        ours, theirs = (lm.get_output_embeddings().weight.shape[0] for lm in (backend.lm, model.lm))
        if theirs < ours:
            raise ModelError(
                f"{section.path}: its head has {theirs} ids and the policy's {ours}, so that it says nothing of the "
                f"last {ours - theirs}; give a teacher with at least as many"
            )
        return cls(model, forward_cost(model.lm))

    def operations(self, sample: TrainSample) -> float:
        """Floating-point operations of a pass over a sample, with its hint if it has one."""
        return self.cost.of(seen_by_teacher(sample), sample.sampled_tokens)

    def shown(
        self, micros: Iterable[tuple[MicroBatch, Divergence | None]], seconds: Seconds = untimed
    ) -> Iterator[MicroBatch]:
        """Micro-batches, each given with how it is compared (None: not at all), with the divergence from the teacher,
        whose pass comes just before. The weights stay the same meanwhile, so the teacher's head is copied once.
        Collective."""
        head = None
        for micro, divergence in micros:
            if divergence is None:
                yield micro
                continue
            MAIN.again()
            with seconds("teacher_s"), torch.no_grad():
                states = self.model(micro.hinted or micro, inputs_alone=True, kept_head=head)
            head = states.weight
            found = partial(divergence_from, states, divergence)
            yield replace(micro, divergence=partial(where_hinted, micro.has_hint, found) if self.by_hint else found)


def where_hinted(has_hint: Tensor | None, divergence: Callable[[HeadInputs], Tensor], policy: HeadInputs) -> Tensor:
    """The divergence at targets with a hint, and 0 at all others, where the policy would learn its own rounding."""
    return divergence(policy) * (0.0 if has_hint is None else has_hint)


# --- the divergence of two heads --------------------------------------------------------------------------------------


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
    """(rows, the teacher's logits, the policy's logits) of each piece, in buffers that the next piece overwrites."""
    ids = len(policy.weight)
    count = max(1, (PIECE_LOGITS if policy.hidden.device.type == "cpu" else ACCELERATOR_PIECE_LOGITS) // ids)
    theirs = LogitChunks(teacher.hidden, teacher.weight[:ids], teacher.divisor, count, cap=teacher.cap)
    ours = LogitChunks(policy.hidden, policy.weight, policy.divisor, count, cap=policy.cap)
    return ((rows, others, own) for (rows, others), (_, own) in zip(theirs, ours, strict=True))
