"""Weight transports: the ways in which weights get to the workers. Either the learner sends buckets of bytes to each
worker over a process group per channel; or a framework loads the weights itself, and a channel only signals when it
has.

A transport knows nothing of versions, checksums or membership. Damaged data is detected by checksum elsewhere, and a
channel that fails is dropped and replaced by a new one. Imports no torch at module level, since every process checks
the configuration.
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
        """Send uint8 buckets on the CPU from the learner's side, in order, by `deadline` (Unix time, seconds). Raises
        RuntimeError or OSError."""

    @abstractmethod
    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """Receive the same buckets in place on the worker's side, by `deadline` (Unix time, seconds)."""


class Transport:
    """Opens links of weight channels; base class of the registry `weights.transport`."""

    carries_weights: ClassVar[bool] = True
    """Whether the channels carry weights; otherwise the trainer loads them, and a channel only signals when it has."""
    takes_servers: ClassVar[bool] = False
    """Whether an inference server can join a channel in its worker's stead (`engine.weights` = 'broadcast')."""

    def __init__(self, config: WeightsSection):
        self.config = config

    @abstractmethod
    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> Link:
        """Connect to the other side of the channel within `invite.timeout_s`; called in the channel's thread.

        `server_ranks`: number of ranks of the inference server that joins in the worker's stead; 0: the worker joins
        itself. Raises RuntimeError or OSError.
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
    """One side of a weight channel whose process group carries the weights."""

    def __init__(self, group: "dist.Backend", backend: str):
        self._group, self._backend = group, backend

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        channel.transfer(self._group, buckets, self._backend, deadline)

    receive = send
    """Receive buckets: the same call as `send`, as a broadcast is the same on both sides."""


# --- externally loaded weights ----------------------------------------------------------------------------------------


class ExternalTransport(Transport):
    """Coordinates engines with a framework that loads the weights into the inference servers itself."""

    carries_weights = False

    def __init__(self, config: WeightsSection):
        super().__init__(config)
        self._collective = CollectiveTransport(config)
        self._externally_loaded = threading.Event()
        """Set while the servers hold the version that was announced last."""

    def expect(self) -> None:
        """Note that a new version is announced, which the framework starts to load."""
        self._externally_loaded.clear()

    def arrived(self) -> None:
        """Note that the framework has loaded the announced version into all servers."""
        self._externally_loaded.set()

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "ExternalLink":
        gloo_invite = msgspec.structs.replace(invite, backend="gloo")
        return ExternalLink(self._collective.meet(gloo_invite, as_learner), self._externally_loaded)


class ExternalLink(Link):
    """A channel that carries no weights: the learner sends one byte once the framework has loaded them."""

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
