"""Chains of workers: the learner sends a version to the first worker of a chain, and each forwards it to the next.

Every worker in a chain still has a channel to the learner; links between workers are additional. A transfer uses them
if the workers of a chain are ready at the same time and take the version in the same form. A worker that is not ready,
or that joined the chain meanwhile, gets the version from the learner. A failure between two workers ends the channel of
the receiver, and the channels of those behind it in the same transfer.

A worker forwards what it receives of a version bucket by bucket, while the rest still arrives:

    chain.forward_to(invite)            # the learner has named the next worker
    with chain.forwarding(0, deadline) as received:     # 0: rank of the learner that sends
        link.receive(buckets, deadline, received)
"""

import contextlib
import logging
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
from torch import Tensor

from april import wire
from april.util import clock
from april.util.lifetime import in_background
from april.weights.channel import (
    MAX_SENDERS,
    ChannelFollow,
    ChannelForward,
    ChannelInvite,
    ChannelLinked,
    DeltaBase,
    WeightChannel,
    WeightPart,
    link_name,
)
from april.weights.snapshot import Snapshot
from april.weights.transports import Link, Received, Transport

log = logging.getLogger(__name__)

CLAIM_S = 0.5
"""Time for which the learner waits for the first worker of a chain to forward a new version to a worker behind it.
After that the learner sends the version to that worker itself (seconds)."""

BUCKETS_PER_WORKER = 16
"""Number of buckets (pieces of a transfer) per worker of a chain into which the largest rank's part of a version is
divided at least, unless the buckets would be smaller than `LEAST_FORWARDED_BYTES`."""
LEAST_FORWARDED_BYTES = 2**18
"""Size in bytes below which the buckets (pieces of a transfer) of a chain are not made smaller, since each costs
processor time in every worker."""


# --- in the learner ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What the learner decides for one worker of a chain, other than its first: that the worker receives a version from
    the worker before it."""

    snapshot: Snapshot
    delta_to: DeltaBase | None
    """Base of the delta in which the version is sent; None: it is sent whole."""
    forwards: bool
    """Whether this worker forwards the version to the next one; False for the last worker that gets the version."""
    workers: int
    """Number of workers that get the version along the chain, its first worker included."""


class Chains:
    """In the learner: which worker's channel follows which in a chain of at most `size` workers. The publisher calls
    all methods with its lock held."""

    def __init__(self, size: int, send: Callable[[WeightChannel, wire.Message], None]):
        """`size`: maximum number of workers in a chain; 1: no chains. `send`: queues a message to a channel's
        worker."""
        self.size, self._send, self._count = size, send, 0

    def extend(self, channels: Iterable[WeightChannel], invite_for: Callable[[WeightChannel], ChannelInvite]) -> None:
        """Join chains of the open `channels` into longer ones of at most `size` workers: the last worker of one chain
        and the first of another are told to connect to each other.

        `invite_for(channel)`: an invitation to the rendezvous store, as for a link of this channel. Both workers get
        it, with a name of its own for the link between them.
        """
        heads = [each for each in channels if each.upstream is None and can_chain(each)]
        if self.size == 1 or len(heads) < 2:
            return
        by_length = sorted(heads, key=lambda head: -len(list(chain_from(head))))
        for at, first in enumerate(by_length):
            for second in by_length[at + 1 :]:
                lengths = len(list(chain_from(first))) + len(list(chain_from(second)))
                fits = lengths <= self.size and (first.backend, first.base) == (second.backend, second.base)
                if fits and second.upstream is None and not second.is_alone:
                    self._join(list(chain_from(first))[-1], second, invite_for(second))

    def _join(self, upstream: WeightChannel, downstream: WeightChannel, invite: ChannelInvite) -> None:
        self._count += 1
        upstream.downstream, downstream.upstream, downstream.is_linked = downstream, upstream, False
        name = f"{downstream.name}/from/{self._count}"
        own = ChannelInvite(name, invite.backend, invite.host, invite.port, invite.timeout_s, invite.senders)
        downstream.link = name
        self._send(upstream, ChannelForward(upstream.name, own))
        self._send(downstream, ChannelFollow(downstream.name, own))

    def note_linked(self, channel: WeightChannel, message: ChannelLinked) -> None:
        """Record whether a worker has connected to the worker before it in its chain."""
        if channel.upstream is None or message.upstream != channel.link:
            return
        if message.error:
            log.warning(
                "worker %s does not reach %s for weights (%s); it gets them from the learner",
                channel.worker, channel.upstream.worker, message.error,
            )  # fmt: skip
            channel.is_alone = True
            unlink(channel)
        else:
            channel.is_linked = True

    def claim(self, head: WeightChannel, snapshot: Snapshot, form: Callable[[WeightChannel], DeltaBase | None]) -> int:
        """Have the chain's first worker (`head`) forward a version to the workers behind it, as far as each of them is
        ready for it and takes it in the same form. `form(channel)`: the version to which its worker is sent a delta;
        None if it is sent the whole version. Returns the number of workers that get the version along the chain, the
        head included."""
        delta_to, members = form(head), list[WeightChannel]()
        for member in list(chain_from(head))[1:]:
            is_ready = member.is_linked and member.state == "ready" and member.acknowledged != snapshot.version
            if not is_ready or form(member) != delta_to:
                break
            members.append(member)
        for at, member in enumerate(members):
            member.state, member.follows = "sending", True
            member.claim = Claim(snapshot, delta_to, at + 1 < len(members), 1 + len(members))
        return 1 + len(members)

    def awaits_claim(self, channel: WeightChannel, snapshot: Snapshot, since: float) -> bool:
        """Whether a channel still waits for the first worker of its chain to forward a version to it. `since`: time
        from which the channel has waited (`clock.now()`, seconds); it waits for at most `CLAIM_S`, then the learner
        sends it the version."""
        if not channel.is_linked or clock.now() - since > CLAIM_S:
            return False
        *_, head = upstreams(channel)
        return head.state == "ready" and head.acknowledged != snapshot.version

    def forget(self, channel: WeightChannel) -> list[WeightChannel]:
        """Take a lost channel out of its chain; returns the channels behind it whose workers were receiving a version
        through it."""
        cut = list[WeightChannel]()
        for member in list(chain_from(channel))[1:]:
            if not member.follows:
                break
            cut.append(member)
        if channel.downstream:
            unlink(channel.downstream)
        unlink(channel)
        return cut


def forwarded_bytes(parts: Iterable[WeightPart], bucket_bytes: int, workers: int) -> int:
    """Size in bytes of the buckets (pieces) in which a version is forwarded along a chain of `workers` workers;
    `bucket_bytes` if `workers` is 1. `parts`: the parts of the version, one for each rank that sends.

    A worker forwards whole buckets, so the last worker is as many buckets behind as there are workers before it. The
    buckets are so small that this is a small share of the largest part.
    """
    if workers == 1:
        return bucket_bytes
    largest = max(part.total_bytes for part in parts)
    return min(bucket_bytes, max(LEAST_FORWARDED_BYTES, largest // (BUCKETS_PER_WORKER * workers)))


def can_chain(channel: WeightChannel) -> bool:
    return channel.is_open and not channel.server_ranks


def chain_from(channel: WeightChannel) -> Iterator[WeightChannel]:
    """A channel, then the channels behind it in its chain, in order."""
    each: WeightChannel | None = channel
    while each:
        yield each
        each = each.downstream


def upstreams(channel: WeightChannel) -> Iterator[WeightChannel]:
    """A channel, then the channels before it in its chain, the nearest first."""
    each: WeightChannel | None = channel
    while each:
        yield each
        each = each.upstream


def unlink(channel: WeightChannel) -> None:
    """Detach a channel from the one before it in its chain."""
    if channel.upstream:
        channel.upstream.downstream = None
    channel.upstream, channel.is_linked, channel.link = None, False, ""


# --- in a worker ------------------------------------------------------------------------------------------------------


class ChainLinks:
    """A worker's links to the worker before it and to the one behind it in its chain: one of each for every rank of the
    learner that sends a part of the weights."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self._upstream: list[Future[Link]] = []
        self._downstream: list[Future[Link]] = []
        self.receives = False
        """Whether a version is arriving from the worker before this one."""

    def forward_to(self, invite: ChannelInvite) -> None:
        """Connect to the worker that `invite` also invites, as the next one in the chain. Links to an earlier one are
        closed."""
        self._close(self._downstream)
        self._downstream = self._meet(invite, as_learner=True)

    def follow(self, invite: ChannelInvite) -> list[Future[Link]]:
        """Connect to the worker that `invite` also invites, as the one before this in the chain; returns futures of the
        links. Links to an earlier one are closed."""
        self._close(self._upstream)
        self._upstream = self._meet(invite, as_learner=False)
        return self._upstream

    @property
    def upstream(self) -> list[Link]:
        """Links to the worker before this one. Raises RuntimeError or OSError if connecting failed."""
        return [link.result() for link in self._upstream]

    @contextlib.contextmanager
    def forwarding(self, sender: int, deadline: float) -> "Iterator[Received | None]":
        """Context manager that yields a function, to be called with each bucket received from the learner's rank
        `sender`, in order. The function has the bucket sent to the next worker of the chain by `deadline` (Unix time,
        seconds). It yields None if there is no next worker. A failure on that link is noticed by the next worker; this
        one does not wait for it."""
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
    """Close a link if it was established."""
    if not link.exception():
        link.result().close()


def not_forwarding() -> AbstractContextManager[None]:
    """Context of a worker that forwards nothing, such as the last one of a chain; stands in for
    `ChainLinks.forwarding`."""
    return contextlib.nullcontext()


def send_on(meeting: Future[Link], arrived: queue.SimpleQueue, deadline: float) -> None:
    """Send the buckets in the queue `arrived` to the next worker of the chain, until the queue yields None. `meeting`:
    future of the link to that worker; `deadline`: Unix time, seconds."""

    def buckets() -> Iterator[Tensor]:
        while (bucket := arrived.get()) is not None:
            yield bucket

    try:
        meeting.result().send(buckets(), deadline)
    except (RuntimeError, OSError) as error:
        log.info("weights are not forwarded any more: %s", error)
