"""Micro-batches through the stages of a model: one forward, one backward (1F1B, as in arXiv 2104.04473).

A stage goes ahead by as many micro-batches as there are stages after it, and then does a backward pass after each
forward pass, so that it never keeps the activations of more. Megatron-core's own schedule asks for CUDA by name, sends
the shape of each tensor, which every stage knows here, before it, and leaves scores on the last stage.

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
from april.learner.phases import Seconds
from april.processes.pulse import MAIN

Scores = tuple[Tensor, Tensor]
BEFORE, NEXT = -1, 1
"""neighbours in a line of stages"""


class Stage(Protocol):
    """Some layers of a model, one after the other."""

    def room(self, micro: MicroBatch) -> Tensor:
        """Without values: what it makes of a micro-batch, or is given."""

    def hidden(self, micro: MicroBatch, given: Tensor | None) -> Tensor:
        """What it makes of what the stage before it has made; of None, the first."""

    def score(self, hidden: Tensor, micro: MicroBatch, temperature: float | None) -> Scores:
        """On the last: log-probability and entropy of each target, float32 [K]."""


class Line:
    """Ranks that have the stages of one model, the first stage first, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.place, self.count = dist.get_rank(group), len(self.ranks)

    @property
    def is_last(self) -> bool:
        return self.place == self.count - 1

    def exchange(self, neighbour: int, sent: Tensor | None, room: Tensor | None) -> Tensor | None:
        """Send to the one BEFORE or NEXT, and have `room` filled by it, which is given back; at once, as both may wait
        for each other. None without such a neighbour."""
        place = self.place + neighbour
        if not 0 <= place < self.count:
            return None
        calls = [(dist.isend, None if sent is None else sent.detach().contiguous()), (dist.irecv, room)]
        given = [(call, tensor) for call, tensor in calls if tensor is not None]
        operations = [dist.P2POp(call, tensor, self.ranks[place], self.group) for call, tensor in given]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return room

    def told(self, values: Tensor) -> Tensor:
        """Those of the last rank."""
        dist.broadcast(values, self.ranks[-1], group=self.group)
        return values


def scores(line: Line, stage: Stage, micros: Sequence[MicroBatch], temperature: float | None) -> list[Scores]:
    """Of each micro-batch, on every rank. Collective."""
    found = []
    with torch.no_grad():
        for micro in micros:
            MAIN.again()
            made = stage.hidden(micro, line.exchange(BEFORE, None, stage.room(micro)))
            if line.is_last:
                found.append(stage.score(made, micro, temperature))
            line.exchange(NEXT, made, None)
    return told(line, found, micros)


def backward(line: Line, stage: Stage, micros: Sequence[MicroBatch], loss: Loss, seconds: Seconds) -> None:
    """As `Backend.backward`: the loss of the last stage has the gradient, those of others are of its values."""
    ahead = min(line.count - 1 - line.place, len(micros))
    waiting: deque[tuple[Tensor | None, Tensor]] = deque()
    found: list[Scores] = []

    def pass_on(number: int, given: Tensor | None) -> Tensor:
        MAIN.again()
        made = stage.hidden(micros[number], given)
        if line.is_last:
            scored = stage.score(made, micros[number], None)
            found.append((scored[0].detach(), scored[1].detach()))
            made = loss(number, *scored)
        waiting.append((given, made))
        return made

    def expected(number: int) -> Tensor | None:
        return stage.room(micros[number]).requires_grad_() if number < len(micros) else None

    with seconds("forward_s"):
        given = line.exchange(BEFORE, None, expected(0))
    for number in range(len(micros) + ahead):
        made = before = None
        with seconds("forward_s"):
            if number < len(micros):
                made = pass_on(number, given)
        with seconds("backward_s"):
            room = torch.empty_like(waiting[0][1]) if number >= ahead else None
            gradient = line.exchange(NEXT, made, room)
            if number >= ahead:
                before, after = waiting.popleft()
                torch.autograd.backward(after, gradient)
            given = line.exchange(BEFORE, None if before is None else before.grad, expected(number + 1))
    with seconds("forward_s"), torch.no_grad():
        scored = told(line, found, micros)
        for number, each in enumerate(scored if not line.is_last else ()):
            loss(number, *each)


def told(line: Line, found: list[Scores], micros: Sequence[MicroBatch]) -> list[Scores]:
    """What the last stage has found, on every rank."""
    if line.count == 1 or not micros:
        return found
    lengths = [len(micro.targets) for micro in micros]
    values = torch.empty(2, sum(lengths), device=micros[0].targets.device)
    if line.is_last:
        values[0], values[1] = (torch.cat(column) for column in zip(*found, strict=True))
    return list(zip(*(column.split(lengths) for column in line.told(values)), strict=True))
