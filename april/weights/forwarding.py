"""Forwarding in a worker: what it receives of a version goes on to the next worker of its chain, bucket by bucket,
while the rest still arrives.

chain.forward_to(invite)            # the learner has named the next worker
with chain.forwarding(0, deadline) as received:
    link.receive(buckets, deadline, received)
"""

import contextlib
import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager

import msgspec
from torch import Tensor

from april.util.lifetime import in_background
from april.weights.channel import MAX_SENDERS, ChannelInvite, link_name
from april.weights.transports import Link, Received, Transport

log = logging.getLogger(__name__)


class ChainLinks:
    """A worker's links to the one before it and the one behind it in its chain, one for each rank that sends."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self._upstream: list[Future[Link]] = []
        self._downstream: list[Future[Link]] = []
        self.receives = False
        """Whether a version is arriving from the worker before this one."""

    def forward_to(self, invite: ChannelInvite) -> None:
        """Meet the next worker, in place of an earlier one."""
        self._close(self._downstream)
        self._downstream = self._meet(invite, as_learner=True)

    def follow(self, invite: ChannelInvite) -> list[Future[Link]]:
        """Meet the worker before this one, in place of an earlier one; returns the links to be."""
        self._close(self._upstream)
        self._upstream = self._meet(invite, as_learner=False)
        return self._upstream

    @property
    def upstream(self) -> list[Link]:
        """Links to the worker before this one. Raises RuntimeError or OSError if it was not met."""
        return [link.result() for link in self._upstream]

    @contextlib.contextmanager
    def forwarding(self, sender: int, deadline: float) -> "Iterator[Received | None]":
        """A function that forwards what has arrived of a rank's part, in order; None if there is no next worker. That
        one finds out if it fails: this one does not wait for it."""
        arrived: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        meeting = self._downstream[sender] if sender < len(self._downstream) else None
        if meeting:
            in_background(send_on, meeting, arrived, deadline)
        try:
            yield arrived.put if meeting else None
        finally:
            arrived.put(None)

    def close(self) -> None:
        self._close(self._upstream)
        self._close(self._downstream)
        self._upstream, self._downstream = [], []

    def _meet(self, invite: ChannelInvite, as_learner: bool) -> list[Future[Link]]:
        names = (link_name(invite.channel, sender) for sender in range(min(invite.senders, MAX_SENDERS)))
        invites = [msgspec.structs.replace(invite, channel=name) for name in names]
        return [in_background(self.transport.meet, own, as_learner) for own in invites]

    @staticmethod
    def _close(links: list[Future[Link]]) -> None:
        for link in links:
            link.add_done_callback(close_met)


def close_met(link: Future[Link]) -> None:
    """Close a link, if it has come about."""
    if not link.exception():
        link.result().close()


def not_forwarding() -> AbstractContextManager[None]:
    """In place of `ChainLinks.forwarding` where a worker is the last one."""
    return contextlib.nullcontext()


def send_on(meeting: Future[Link], arrived: queue.SimpleQueue, deadline: float) -> None:
    """Send to the next worker what arrives, until None does."""

    def buckets() -> Iterator[Tensor]:
        while (bucket := arrived.get()) is not None:
            yield bucket

    try:
        meeting.result().send(buckets(), deadline)
    except (RuntimeError, OSError) as error:
        log.info("weights are not forwarded any more: %s", error)
