"""Lanes as process groups of torch: gloo between any devices, NCCL or RCCL between accelerators, as the invitation has
it. This module is read without torch: a configuration is checked everywhere.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from april.weights.lane_messages import LaneInvite
from april.weights.transport import Link, Transport

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class CollectiveTransport(Transport):
    takes_servers = True

    def meet(self, invite: LaneInvite, as_learner: bool, server_ranks: int = 0) -> "GroupLink":
        from april.connections import store
        from april.weights import lane

        meeting = store.connect(invite.host, invite.port, invite.timeout_s)
        rank = lane.LEARNER if as_learner else lane.WORKER
        group = lane.join(invite.lane, meeting, rank, invite.backend, invite.timeout_s, server_ranks)
        return GroupLink(group, invite.backend)


class GroupLink(Link):
    def __init__(self, group: "dist.Backend", backend: str):
        self._group, self._backend = group, backend

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        from april.weights import lane

        lane.transfer(self._group, buckets, self._backend, deadline)

    receive = send
    """a broadcast is the same on both sides"""
