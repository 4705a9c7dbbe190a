"""Weight transports: the learner passes in buckets of bytes, which arrive at one worker, over a process group per
channel; or a framework loads the weights itself, and a channel only signals when it has.

A transport knows nothing of versions, checksums or membership. Damaged data is detected by checksum elsewhere, and a
channel that fails is dropped and built anew. Imports no torch at module level, since every process checks the
configuration.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import msgspec

from april.config import WeightsSection
from april.util import clock
from april.weights import channel
from april.weights.channel import ChannelInvite

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class Link:
    """One side of an open weight channel."""

    @abstractmethod
    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """The learner's side: send uint8 buckets on the CPU, in order, by `deadline` (Unix time, seconds). Raises
        RuntimeError or OSError."""

    @abstractmethod
    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """The worker's side: fill the same buckets in place, by `deadline`."""


class Transport:
    """Opens links of weight channels; base class of the registry `weights.transport`."""

    carries_weights: ClassVar[bool] = True
    """Whether the channels carry weights; otherwise the trainer loads them, and a channel only signals when it has."""
    takes_servers: ClassVar[bool] = False
    """Whether an inference server can take its worker's place in a channel (`engine.weights` = 'broadcast')."""

    def __init__(self, config: WeightsSection):
        self.config = config

    @abstractmethod
    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> Link:
        """Connect to the other side of the channel within `invite.timeout_s`; called in the channel's thread.

        `server_ranks`: ranks of the server that takes the worker's place; 0 if none does. Raises RuntimeError or
        OSError.
        """


# --- process groups ---------------------------------------------------------------------------------------------------


class CollectiveTransport(Transport):
    """Broadcasts weights over a process group per channel."""

    takes_servers = True

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "GroupLink":
        rendezvous = channel.connect_to_store(invite.host, invite.port, invite.timeout_s)
        rank = channel.LEARNER if as_learner else channel.WORKER
        group = channel.join(invite.channel, rendezvous, rank, invite.backend, invite.timeout_s, server_ranks)
        return GroupLink(group, invite.backend)


class GroupLink(Link):
    """One side of a process group."""

    def __init__(self, group: "dist.Backend", backend: str):
        self._group, self._backend = group, backend

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        channel.transfer(self._group, buckets, self._backend, deadline)

    receive = send
    """A broadcast is the same call on both sides."""


# --- externally loaded weights ----------------------------------------------------------------------------------------


class ExternalTransport(Transport):
    """Coordinates engines with a framework that loads the weights."""

    carries_weights = False

    def __init__(self, config: WeightsSection):
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
