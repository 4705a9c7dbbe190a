"""Weights that others bring: a trainer's framework loads them into the inference servers itself, and April is told.

A lane carries no weights then, but the order of things: an engine stops, says so, and goes on under the new name once
the trainer has said that its framework is done (`Rollouts.updating`).
"""

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from april.processes import clock
from april.weights.collective import CollectiveTransport, GroupLink
from april.weights.lane_messages import LaneInvite
from april.weights.transport import Link, Transport

if TYPE_CHECKING:
    from torch import Tensor

    from april.config import WeightsSection


class ExternalTransport(Transport):
    brings = False

    def __init__(self, config: "WeightsSection"):
        super().__init__(config)
        self._meeting = CollectiveTransport(config)
        self._brought = threading.Event()
        """whether the servers hold the version that was announced last"""

    def expect(self) -> None:
        """Others begin to bring a version."""
        self._brought.clear()

    def arrived(self) -> None:
        self._brought.set()

    def meet(self, invite: LaneInvite, as_learner: bool, server_ranks: int = 0) -> "ExternalLink":
        of_processors = msgspec.structs.replace(invite, backend="gloo")
        return ExternalLink(self._meeting.meet(of_processors, as_learner), self._brought)


class ExternalLink(Link):
    """One byte goes over it, once the weights are there."""

    def __init__(self, link: GroupLink, brought: threading.Event):
        self._link, self._brought = link, brought

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        if not self._brought.wait(max(0.0, deadline - clock.now())):
            raise TimeoutError("others have not brought the weights within weights.transfer_deadline_s")
        self._signal(deadline)

    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        self._signal(deadline)

    def _signal(self, deadline: float) -> None:
        import torch

        self._link.send([torch.zeros(1, dtype=torch.uint8)], deadline)
