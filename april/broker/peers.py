"""Connected processes: a session per peer with a data and a control connection, its last known state, and the
messages queued for it."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from april import wire
from april.wire import limits
from april.wire.message import Version

HOLDERS = ("worker", "scorer", "agents")
"""Roles that hold leases."""
SPEED_WINDOW_S = 5.0
"""Window over which a worker's tokens per second are measured."""


class PeerLoop(NamedTuple):
    """Position of a peer's main loop, as its last heartbeat said."""

    peer: str
    """Name of the peer."""
    position: str
    """Stage the loop is in, such as `a micro-batch`; empty if the peer does not report it."""
    for_s: float
    """Seconds it has been there."""
    usual_s: float
    """Median seconds it stays there; 0 if unknown."""


@dataclass(slots=True)
class GrantBuilder:
    """A `wire.Grants` message that is being built."""

    task_indices: dict[int, int] = field(default_factory=dict)
    """Index in `tasks`, by group."""
    tasks: list[wire.Task] = field(default_factory=list)
    grants: list[wire.Grant] = field(default_factory=list)
    prompts: list[wire.PackedArray] = field(default_factory=list)
    responses: list[wire.PackedArray] = field(default_factory=list)

    def add_task(self, task: wire.Task, prompt: wire.PackedArray) -> int:
        """Append a group's task and prompt; returns its index in `tasks`."""
        self.tasks.append(task)
        self.prompts.append(prompt)
        return self.task_indices.setdefault(task.group, len(self.tasks) - 1)

    def add(self, grant: wire.Grant, responses: list[wire.PackedArray]) -> None:
        self.grants.append(grant)
        self.responses += responses

    @property
    def arrays(self) -> list[wire.PackedArray]:
        return [*self.prompts, *self.responses]


@dataclass(slots=True)
class PendingAnswers:
    """What a lease holder is sent after the journal's next sync: acks, nacks and rejects of its reports, and grants."""

    acks: dict[int, int] = field(default_factory=dict)
    """Durable response tokens, by lease."""
    done: list[int] = field(default_factory=list)
    """Leases that have ended as the holder reported."""
    nacks: dict[int, int] = field(default_factory=dict)
    """Response tokens the broker has, by lease that has to report again from there."""
    rejects: list[tuple[int, str]] = field(default_factory=list)
    """(lease id, reason) of reports that were not accepted."""
    leases: list[GrantBuilder] = field(default_factory=list)

    def new_leases(self) -> GrantBuilder:
        """The message that takes the next grant; a full one is followed by a new one."""
        if not self.leases or len(self.leases[-1].responses) >= limits.MAX_GRANT_ARRAYS:
            self.leases.append(GrantBuilder())
        return self.leases[-1]

    def messages(self) -> Iterator[tuple[wire.Message, list[wire.PackedArray]]]:
        """The queued messages, each with its arrays."""
        if self.acks or self.done or self.nacks or self.rejects:
            yield wire.Answers(list(self.acks.items()), self.done, list(self.nacks.items()), self.rejects), []
        for leases in self.leases:
            yield wire.Grants(leases.tasks, leases.grants), leases.arrays


@dataclass(slots=True)
class Peer:
    """A connected process, from its hello to the end of its session."""

    id: int
    """Session id; never used again in a run."""
    role: str
    name: str
    uid: str
    """Unique id of the process, which its leases are recorded under."""
    data_route: bytes
    last_seen: float
    """Time of its last message."""
    control_route: bytes | None = None
    """None before the control connection is bound; empty once the connections are gone."""
    key: str = ""
    """CURVE key of its connections; empty without CURVE."""
    version: Version | None = None
    """Weights that a worker has loaded."""
    capacity: int = 0
    """Most leases it takes at once."""
    address: str = ""
    """Base URL of an agents process's API."""
    started: bool = False
    """Whether a learner has said which checkpoint it holds."""
    sent_bytes: int = 0
    """Bytes of arrays sent to it in this session."""
    received_bytes: int = 0
    """Bytes of arrays it says it has received."""
    pending: PendingAnswers = field(default_factory=PendingAnswers)
    """Answers and grants it is sent after the next sync."""
    loop_position: str = ""
    """Stage its main loop is in; empty if it does not report it."""
    loop_since: float = 0.0
    """Time since when the loop is there."""
    loop_usual_s: float = 0.0
    """Median seconds the loop stays there."""
    slots: wire.Slots | None = None
    """Use of a worker's slots, by its last heartbeat that reported it."""
    recent_tokens: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, tokens) of the chunks accepted within `SPEED_WINDOW_S`."""

    def note_heartbeat(self, beat: wire.Heartbeat, now: float) -> None:
        self.received_bytes = max(self.received_bytes, beat.received_bytes)
        if beat.loop_position:
            self.loop_position, self.loop_since, self.loop_usual_s = (
                beat.loop_position,
                now - beat.loop_elapsed_s,
                beat.loop_usual_s,
            )

    def loop(self, now: float) -> PeerLoop:
        elapsed_s = now - self.loop_since if self.loop_position else 0.0
        return PeerLoop(self.name, self.loop_position, elapsed_s, self.loop_usual_s)

    def note_tokens(self, now: float, tokens: int) -> None:
        """Count accepted tokens towards the worker's speed."""
        self.recent_tokens.append((now, tokens))
        while self.recent_tokens[0][0] < now - SPEED_WINDOW_S:
            self.recent_tokens.popleft()

    @property
    def step(self) -> int:
        """Policy step of the weights the worker has loaded; -1 before the first load."""
        return -1 if self.version is None else self.version.step

    def tokens_per_s(self, now: float) -> float:
        return sum(tokens for at, tokens in self.recent_tokens if at > now - SPEED_WINDOW_S) / SPEED_WINDOW_S


@dataclass(slots=True)
class TokenTally:
    """Sampled tokens of one worker process, over all its sessions."""

    emitted: int = 0
    """Tokens its engine has sampled, by its own count."""
    acknowledged: int = 0
    refused: int = 0

    @property
    def lost(self) -> int:
        """Tokens sampled, but neither acknowledged nor refused."""
        return max(0, self.emitted - self.acknowledged - self.refused)


@dataclass(slots=True)
class Outgoing:
    """A message queued for sending."""

    route: bytes
    message: wire.Message
    arrays: list[np.ndarray | wire.PackedArray] = field(default_factory=list)
    session: int = 0
    """Session id in its header; 0 for a connection without a session."""
    sequence: int = 0
    """Sequence number of the request it answers; 0 if it answers none."""
    protocol: int = wire.PROTOCOL
    """Protocol version in its header; another one only to refuse a peer that speaks that."""


class Peers:
    """All connected peers, and the messages that wait to be sent to them."""

    def __init__(self):
        self.by_id: dict[int, Peer] = {}
        self.tallies: dict[str, TokenTally] = {}
        """Token counts by uid of the worker process."""
        self.forgotten = TokenTally()
        """Sum over processes no longer in `tallies`; its `emitted` holds only their lost tokens."""
        self.refusals: Counter[str] = Counter()
        """Messages that were not accepted, by cause; one for each `Refused` or reject."""
        self.outgoing: list[Outgoing] = []
        """Messages to send after the journal's next sync."""
        self.immediate: list[Outgoing] = []
        """Messages to send now, since they rest on nothing that is not on disk."""
        self._next_id = 1
        self._with_pending: dict[int, Peer] = {}

    def start_ids(self, broker_start: int) -> None:
        """Begin the session ids of the given start of the broker: none repeats one of an earlier start."""
        self._next_id = (broker_start << 32) + 1

    def open(self, hello: wire.Hello, route: bytes, now: float, key: str = "") -> Peer:
        peer = Peer(self._next_id, hello.role, hello.name, hello.uid, route, now, key=key)
        self.by_id[peer.id] = peer
        self._next_id += 1
        if peer.uid not in self.tallies:
            self.tallies[peer.uid] = TokenTally(acknowledged=hello.acknowledged_tokens)
            self._fold_tallies()
        return peer

    def _fold_tallies(self) -> None:
        """Forget the processes that left first once there are too many; their tokens stay counted in `forgotten`."""
        if len(self.tallies) <= limits.MAX_TALLIES:
            return
        connected = {peer.uid for peer in self.by_id.values()}
        for uid in [uid for uid in self.tallies if uid not in connected][: limits.MAX_TALLIES // 2]:
            tally = self.tallies.pop(uid)
            self.forgotten.emitted += tally.lost
            self.forgotten.refused += tally.refused

    def close(self, peer: Peer) -> None:
        self.by_id.pop(peer.id, None)

    def invalidate(self, route: bytes) -> None:
        """Handle a lost connection, whose messages may be lost: drop its session's routes until the peer says hello."""
        for peer in self.by_id.values():
            if route in (peer.data_route, peer.control_route):
                peer.data_route = peer.control_route = b""

    def unacknowledged_tokens(self) -> int:
        """Tokens sampled by workers that are gone, and never acknowledged or refused."""
        connected = {peer.uid for peer in self.by_id.values()}
        gone = (tally for uid, tally in self.tallies.items() if uid not in connected)
        return self.forgotten.emitted + sum(tally.lost for tally in gone)

    def refused_tokens(self) -> int:
        return self.forgotten.refused + sum(tally.refused for tally in self.tallies.values())

    def with_role(self, role: str) -> list[Peer]:
        return [peer for peer in self.by_id.values() if peer.role == role]

    def workers(self) -> list[Peer]:
        return self.with_role("worker")

    def scorers(self) -> list[Peer]:
        return self.with_role("scorer")

    def holders(self) -> list[Peer]:
        """Lease holders: workers, scorers and agents processes."""
        return [peer for peer in self.by_id.values() if peer.role in HOLDERS]

    def learner(self) -> Peer | None:
        return next((peer for peer in self.by_id.values() if peer.role == "learner"), None)

    def holder(self, uid: str) -> Peer | None:
        """The connected lease holder with this process uid."""
        return next((peer for peer in self.by_id.values() if peer.uid == uid and peer.role in HOLDERS), None)

    def send(
        self,
        peer: Peer,
        message: wire.Message,
        arrays: Sequence[np.ndarray | wire.PackedArray] = (),
        sequence: int = 0,
    ) -> None:
        """Queue a message for the data connection, behind those queued before, after the next sync."""
        peer.sent_bytes += sum(len(a.data) if isinstance(a, wire.PackedArray) else a.nbytes for a in arrays)
        self.outgoing.append(Outgoing(peer.data_route, message, list(arrays), peer.id, sequence))

    def send_now(self, peer: Peer, message: wire.Message, arrays: list[wire.PackedArray], sequence: int = 0) -> None:
        """Queue a message that rests on nothing that is not on disk: it does not wait for a sync."""
        peer.sent_bytes += sum(len(packed.data) for packed in arrays)
        self.immediate.append(Outgoing(peer.data_route, message, list(arrays), peer.id, sequence))

    def refuse(self, cause: str, reason: str, route: bytes, session: int = 0, sequence: int = 0) -> None:
        """Count a message that is not accepted, and queue the answer; `cause` is never a peer's own text."""
        self.refusals[cause] += 1
        self.outgoing.append(Outgoing(route, wire.Refused(reason), [], session, sequence))

    def has_credit(self, peer: Peer, credit_bytes: int) -> bool:
        """Whether fewer than `credit_bytes` of arrays sent to it are unread; one message may exceed the credit."""
        return peer.sent_bytes - peer.received_bytes < credit_bytes

    def pending_for(self, peer: Peer) -> PendingAnswers:
        """The answers that the peer is sent after the next sync, for adding to them."""
        self._with_pending[peer.id] = peer
        return peer.pending

    def acknowledge(self, peer: Peer, lease_id: int, length: int | None = None) -> None:
        """Ack the first `length` response tokens of a lease; None acks the end of the lease."""
        pending = self.pending_for(peer)
        if length is None:
            pending.done.append(lease_id)
        else:
            pending.acks[lease_id] = length

    def nack(self, peer: Peer, lease_id: int, length: int) -> None:
        """Ask for a lease's response tokens from `length` on once more."""
        self.pending_for(peer).nacks[lease_id] = length

    def reject(self, peer: Peer, lease_id: int, reason: str) -> None:
        """Reject what was reported of one lease; counted by the part of the reason before its colon."""
        self.refusals[reason.split(":")[0]] += 1
        self.pending_for(peer).rejects.append((lease_id, reason))

    def take_outgoing(self) -> list[Outgoing]:
        """Take the queued messages, connection by connection: the answers to its reports first, then the others."""
        by_route: dict[bytes, list[Outgoing]] = {}
        for peer in self._with_pending.values():
            pending, peer.pending = peer.pending, PendingAnswers()
            for message, arrays in pending.messages():
                route = peer.data_route
                by_route.setdefault(route, []).append(Outgoing(route, message, [*arrays], peer.id))
        for outgoing in self.outgoing:
            by_route.setdefault(outgoing.route, []).append(outgoing)
        self._with_pending, self.outgoing = {}, []
        return [outgoing for messages in by_route.values() for outgoing in messages]

    def answer_heartbeat(self, peer: Peer, lost: list[int]) -> None:
        """Answer without waiting for a sync, since no crash can make it wrong: a lost lease stays lost."""
        route = peer.control_route or peer.data_route
        self.immediate.append(Outgoing(route, wire.Renewed(lost), [], peer.id))

    def take_immediate(self) -> list[Outgoing]:
        """Take the messages that need not wait for a sync."""
        immediate, self.immediate = self.immediate, []
        return immediate

    def send_control(self, peer: Peer, message: wire.Message) -> None:
        """Queue a message for the control connection, which does not wait behind arrays on the data connection."""
        self.outgoing.append(Outgoing(peer.control_route or peer.data_route, message, [], peer.id))

    def refuse_protocol(self, error: wire.ProtocolMismatch, reason: str, route: bytes) -> None:
        """Refuse a peer of another protocol version, in that version, which it understands."""
        self.refusals[error.cause] += 1
        self.outgoing.append(Outgoing(route, wire.Refused(reason), protocol=error.protocol))

    def broadcast(self, message: wire.Message) -> None:
        """Queue a message for the control connection of every lease holder."""
        for peer in self.holders():
            self.send_control(peer, message)
