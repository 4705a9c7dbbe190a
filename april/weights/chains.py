"""Chains of workers: the learner sends a version to the first worker of a chain, and each forwards it to the next.

Every worker has its channel to the learner all the same. Links between workers are made beside these, and a transfer
goes over them if the workers of a chain are ready at the same time and take the version in the same form. Who is not,
or has come in between, gets the version from the learner. What fails between two workers costs the channel of the one
that receives, and those behind it in the same transfer.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from april import wire
from april.util import clock
from april.weights.channel import ChannelFollow, ChannelForward, ChannelInvite, ChannelLinked, DeltaBase, WeightChannel
from april.weights.snapshot import Snapshot

log = logging.getLogger(__name__)

CLAIM_S = 0.5
"""Longest wait of a worker's channel for the head of its chain to send a new version, before it sends itself."""


@dataclass(frozen=True)
class Claim:
    """A version that the head of a chain sends to the workers behind it."""

    snapshot: Snapshot
    delta_to: DeltaBase | None
    """The weights to which it comes as a delta; None: whole."""
    forwards: bool
    """Whether the worker is not the last one that takes part."""


class Chains:
    """The chains of a publisher's channels, of at most `size` workers each. Its functions are called with the
    publisher's lock held."""

    def __init__(self, size: int, send: Callable[[WeightChannel, wire.Message], None]):
        """`send` queues a message to a channel's worker."""
        self.size, self._send, self._count = size, send, 0

    def extend(self, channels: Iterable[WeightChannel], invite_for: Callable[[WeightChannel], ChannelInvite]) -> None:
        """Have workers meet where two chains can be joined. `invite_for`: an invitation to a channel's groups, of which
        the name is replaced."""
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
        """Note whether a worker has met the one before it."""
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

    def claim(self, head: WeightChannel, snapshot: Snapshot, form: Callable[[WeightChannel], DeltaBase | None]) -> bool:
        """Claim the workers behind a head that are ready for a version, and take it in the head's form, as deltas to
        `form(channel)`; returns whether the head forwards."""
        delta_to, members = form(head), list[WeightChannel]()
        for member in list(chain_from(head))[1:]:
            is_ready = member.is_linked and member.state == "ready" and member.acknowledged != snapshot.version
            if not is_ready or form(member) != delta_to:
                break
            members.append(member)
        for at, member in enumerate(members):
            member.state, member.follows = "sending", True
            member.claim = Claim(snapshot, delta_to, forwards=at + 1 < len(members))
        return bool(members)

    def awaits_claim(self, channel: WeightChannel, snapshot: Snapshot, since: float) -> bool:
        """Whether a channel leaves a version, which has been there since a time, to the head of its chain."""
        if not channel.is_linked or clock.now() - since > CLAIM_S:
            return False
        *_, head = upstreams(channel)
        return head.state == "ready" and head.acknowledged != snapshot.version

    def forget(self, channel: WeightChannel) -> list[WeightChannel]:
        """Take a lost channel out of its chain; returns those that were to receive a version through it."""
        cut = list[WeightChannel]()
        for member in list(chain_from(channel))[1:]:
            if not member.follows:
                break
            cut.append(member)
        if channel.downstream:
            unlink(channel.downstream)
        unlink(channel)
        return cut


def can_chain(channel: WeightChannel) -> bool:
    return channel.state in ("ready", "sending") and not channel.server_ranks


def chain_from(channel: WeightChannel) -> Iterator[WeightChannel]:
    """A channel and those behind it in its chain."""
    each: WeightChannel | None = channel
    while each:
        yield each
        each = each.downstream


def upstreams(channel: WeightChannel) -> Iterator[WeightChannel]:
    """A channel and those before it in its chain."""
    each: WeightChannel | None = channel
    while each:
        yield each
        each = each.upstream


def unlink(channel: WeightChannel) -> None:
    """Cut a channel off the one before it."""
    if channel.upstream:
        channel.upstream.downstream = None
    channel.upstream, channel.is_linked, channel.link = None, False, ""
