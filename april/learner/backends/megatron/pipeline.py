"""Pipeline schedule of micro-batches over stages: one forward, one backward (1F1B, arXiv 2104.04473).

A stage runs ahead by as many micro-batches as there are stages after it, and then does one backward pass after each
forward pass. So it keeps the activations of at most one micro-batch more than there are stages after it.

Megatron-core's own schedule hard-codes CUDA, sends each tensor's shape first (here every stage knows it), and leaves
the scores on the last stage.

    stage 0   F0 F1 F2 B0 F3 B1 F4 B2    B3    B4
    stage 1      F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3 F4 B4     (a drawing; waits are left out)
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from april.learner.backends.backend import Loss
from april.learner.packing import MicroBatch
from april.learner.performance import Seconds
from april.util.pulse import MAIN

Scores = tuple[Tensor, Tensor]
BEFORE, NEXT = -1, 1
"""Offsets from a pipeline stage to its neighbours: the previous stage and the next stage."""


class Stage(Protocol):
    """Interface of a pipeline stage: consecutive layers of a model on one rank."""

    def empty_activations(self, micro: MicroBatch) -> Tensor:
        """Uninitialised tensor with the shape and dtype of the activations passed between stages for a micro-batch."""

    def hidden(self, micro: MicroBatch, inputs: Tensor | None) -> Tensor:
        """Output of the stage, from the previous stage's output `inputs`; None on the first stage."""

    def score(self, hidden: Tensor, micro: MicroBatch, temperature: float | None) -> Scores:
        """Log-probability and entropy of each target, float32 [K] each, from the stage's output `hidden`; only on the
        last stage. `temperature` None: the micro-batch's, or without one the policy's."""


class PipelineRanks:
    """The ranks that hold the stages of one model, in the order of the stages, and this rank's stage."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.stage, self.count = dist.get_rank(group), len(self.ranks)

    @property
    def is_last(self) -> bool:
        return self.stage == self.count - 1

    def exchange(self, neighbour: int, sent: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        """Send `sent` to the stage before or after this one (`neighbour`: BEFORE or NEXT), and receive from it into
        `buffer`, which is returned; None: nothing is sent, or received. Both run concurrently, since one after the
        other two neighbours could deadlock. Returns None if there is no such stage."""
        stage = self.stage + neighbour
        if not 0 <= stage < self.count:
            return None
        transfers = [(dist.isend, None if sent is None else sent.detach().contiguous()), (dist.irecv, buffer)]
        transfers = [(call, tensor) for call, tensor in transfers if tensor is not None]
        operations = [dist.P2POp(call, tensor, self.ranks[stage], self.group) for call, tensor in transfers]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return buffer

    def broadcast_from_last(self, values: Tensor) -> Tensor:
        """Broadcast the tensor `values` from the last stage into `values` on the other stages. Collective."""
        dist.broadcast(values, self.ranks[-1], group=self.group)
        return values


def scores(ranks: PipelineRanks, stage: Stage, micros: Sequence[MicroBatch], temperature: float | None) -> list[Scores]:
    """(log-probabilities, entropies) of the K targets of each micro-batch, float32 [K] each, on every rank.
    `temperature` None: the micro-batch's, or without one the policy's. Collective."""
    found = []
    with torch.no_grad():
        for micro in micros:
            MAIN.again()
            output = stage.hidden(micro, ranks.exchange(BEFORE, None, stage.empty_activations(micro)))
            if ranks.is_last:
                found.append(stage.score(output, micro, temperature))
            ranks.exchange(NEXT, output, None)
    return broadcast_scores(ranks, found, micros)


def backward(ranks: PipelineRanks, stage: Stage, micros: Sequence[MicroBatch], loss: Loss, seconds: Seconds) -> None:
    """`Backend.backward` over stages: the last stage's loss has the gradient; the other stages call `loss` afterwards,
    with the last stage's scores and without gradients. Collective."""
    ahead = min(ranks.count - 1 - ranks.stage, len(micros))
    waiting: deque[tuple[Tensor | None, Tensor]] = deque()
    found: list[Scores] = []

    def run_forward(number: int, inputs: Tensor | None) -> Tensor:
        MAIN.again()
        output = stage.hidden(micros[number], inputs)
        if ranks.is_last:
            scored = stage.score(output, micros[number], None)
            found.append((scored[0].detach(), scored[1].detach()))
            output = loss(number, *scored)
        waiting.append((inputs, output))
        return output

    def input_buffer(number: int) -> Tensor | None:
        return stage.empty_activations(micros[number]).requires_grad_() if number < len(micros) else None

    with seconds("forward_s"):
        inputs = ranks.exchange(BEFORE, None, input_buffer(0))
    for number in range(len(micros) + ahead):
        output = inputs_of_backward = None
        with seconds("forward_s"):
            if number < len(micros):
                output = run_forward(number, inputs)
        with seconds("backward_s"):
            buffer = torch.empty_like(waiting[0][1]) if number >= ahead else None
            gradient = ranks.exchange(NEXT, output, buffer)
            if number >= ahead:
                inputs_of_backward, output_of_backward = waiting.popleft()
                torch.autograd.backward(output_of_backward, gradient)
            inputs = ranks.exchange(
                BEFORE, None if inputs_of_backward is None else inputs_of_backward.grad, input_buffer(number + 1)
            )
    with seconds("forward_s"), torch.no_grad():
        scored = broadcast_scores(ranks, found, micros)
        for number, each in enumerate(scored if not ranks.is_last else ()):
            loss(number, *each)


def broadcast_scores(ranks: PipelineRanks, found: list[Scores], micros: Sequence[MicroBatch]) -> list[Scores]:
    """Broadcast `found`, the last stage's (log-probabilities, entropies) of each micro-batch, to every rank.
    Collective."""
    if ranks.count == 1 or not micros:
        return found
    lengths = [len(micro.targets) for micro in micros]
    values = torch.empty(2, sum(lengths), device=micros[0].targets.device)
    if ranks.is_last:
        values[0], values[1] = (torch.cat(column) for column in zip(*found, strict=True))
    return list(zip(*(column.split(lengths) for column in ranks.broadcast_from_last(values)), strict=True))
