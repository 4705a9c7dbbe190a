"""Weight channels as torch process groups: gloo between any devices, NCCL or RCCL between accelerators.

Imports no torch at module level, since every process checks the configuration.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from april.weights.lane_messages import ChannelInvite
from april.weights.transport import Link, Transport

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class CollectiveTransport(Transport):
    """Broadcasts weights over a process group per channel."""

    takes_servers = True

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "GroupLink":
        from april.connections import store
        from april.weights import lane

        rendezvous = store.connect(invite.host, invite.port, invite.timeout_s)
        rank = lane.LEARNER if as_learner else lane.WORKER
        group = lane.join(invite.channel, rendezvous, rank, invite.backend, invite.timeout_s, server_ranks)
        return GroupLink(group, invite.backend)


class GroupLink(Link):
    """One side of a process group."""

    def __init__(self, group: "dist.Backend", backend: str):
        self._group, self._backend = group, backend

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        from april.weights import lane

        lane.transfer(self._group, buckets, self._backend, deadline)

    receive = send
    """A broadcast is the same call on both sides."""
