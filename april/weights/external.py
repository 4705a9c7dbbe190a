"""Externally loaded weights: the trainer's framework loads them into the inference servers itself.

The weight channels then carry no weights and only keep the order: an engine stops, confirms that, and continues under
the new version once the trainer has reported that its framework is done (`Rollouts.updating`).
"""

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from april.processes import clock
from april.weights.collective import CollectiveTransport, GroupLink
from april.weights.lane_messages import ChannelInvite
from april.weights.transport import Link, Transport

if TYPE_CHECKING:
    from torch import Tensor

    from april.config import WeightsSection


class ExternalTransport(Transport):
    """Coordinates engines with a framework that loads the weights."""

    carries_weights = False

    def __init__(self, config: "WeightsSection"):
        super().__init__(config)
        self._collective = CollectiveTransport(config)
        self._externally_loaded = threading.Event()
        """Set while the servers hold the version that was announced last."""

    def expect(self) -> None:
        """A new version is announced; the framework starts to load it."""
        self._externally_loaded.clear()

    def arrived(self) -> None:
        """The framework has loaded the announced version into all servers."""
        self._externally_loaded.set()

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "ExternalLink":
        gloo_invite = msgspec.structs.replace(invite, backend="gloo")
        return ExternalLink(self._collective.meet(gloo_invite, as_learner), self._externally_loaded)


class ExternalLink(Link):
    """Carries one byte, sent once the weights are loaded."""

    def __init__(self, link: GroupLink, externally_loaded: threading.Event):
        self._link, self._externally_loaded = link, externally_loaded

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        if not self._externally_loaded.wait(max(0.0, deadline - clock.now())):
            raise TimeoutError("the trainer has not loaded the weights within weights.transfer_deadline_s")
        self._signal(deadline)

    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        self._signal(deadline)

    def _signal(self, deadline: float) -> None:
        import torch

        self._link.send([torch.zeros(1, dtype=torch.uint8)], deadline)
