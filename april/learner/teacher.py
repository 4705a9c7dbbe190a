"""A teacher in the learner, which gives each token a distribution: a frozen model, sharded like the policy, or the
policy itself under a prompt with a hint.

teacher = Teacher.of(config, backend)                   # None if the configuration has none
micros = teacher.shown((micro, divergence) for micro in micros)
backend.backward(micros, loss)                          # the policy returns the divergence from it as a third column
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
from april.learner.head_divergence import Divergence, divergence_from
from april.learner.loading import ModelError
from april.learner.packing import HeadInputs, MicroBatch, seen_by_teacher
from april.learner.performance import Cost, Seconds, forward_cost, untimed
from april.util.pulse import MAIN


class Teacher:
    """A model whose distribution of each token the policy is compared with, to be trained towards it."""

    def __init__(self, model: nn.Module, cost: Cost, by_hint: bool = False):
        """`model` returns `HeadInputs` of a micro-batch if called with `inputs_alone`; `cost`: cost of its forward
        pass; `by_hint`: the model is the policy itself, which teaches only at targets whose prompt has a hint."""
        self.model, self.cost, self.by_hint = model, cost, by_hint

    @classmethod
    def of(cls, config: Config, backend: Backend) -> Self | None:
        """The configured teacher, None if the learner has none. Collective. Raises ModelError for a teacher whose
        output head has fewer token ids than the policy's."""
        section = held_teacher(config)
        if not named(config, "divergence") or not (section or config.algorithm.hint):
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
        """Yield each micro-batch after the teacher's forward pass on it, with a `divergence`: a function of the
        policy's `HeadInputs`. `micros`: (micro-batch, divergence to compute; None: it is yielded as it is). The
        teacher's head is copied once for all, so its weights must not change meanwhile. `seconds`: times the passes.
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
    """`divergence` of the `policy`'s head inputs, with 0 at the targets without a hint (`has_hint`; None: none has
    one): there teacher and policy are the same, and only rounding would be learnt."""
    return divergence(policy) * (0.0 if has_hint is None else has_hint)
