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
from april.wire.security.allow_list import KeyOwner

HOLDERS = ("worker", "scorer", "agents")
"""Roles that hold leases."""
RESERVED_FOR = (("learner", "node"), ("monitor",))
"""Groups of roles. For each group a share of the sessions is reserved, which no other role gets."""
RESERVED_SHARE = 16
"""`security.max_sessions` divided by this is the number of sessions that are reserved for each group of roles in
`RESERVED_FOR`."""
SESSION_BITS = 32
"""Number of low bits of a session id that count sessions; the higher bits are the number of the broker's start."""
SPEED_WINDOW_S = 5.0
"""Length of the window of newest seconds over which a worker's tokens per second are measured."""


class PeerLoop(NamedTuple):
    """Position of a peer's main loop, as reported by the peer's last heartbeat."""

    peer: str
    """Name of the peer."""
    position: str
    """Stage that the loop is in, such as `a micro-batch`; empty if the peer does not report it."""
    for_s: float
    """Seconds that the loop has been in the stage `position`."""
    usual_s: float
    """Median of the seconds that the loop has stayed in the stage `position` at earlier times; 0 if unknown."""


@dataclass(slots=True)
class GrantBuilder:
    """A `wire.Grants` message that is being built."""

    task_indices: dict[int, int] = field(default_factory=dict)
    """Index of each group's task in `tasks`, by group id."""
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
    """Messages that a lease holder gets after the journal's next sync: acks, nacks and rejects of its reports, and
    grants."""

    acks: dict[int, int] = field(default_factory=dict)
    """Number of response tokens that are on disk, by lease id."""
    done: list[int] = field(default_factory=list)
    """Ids of leases whose end, which the holder has reported, is acknowledged."""
    nacks: dict[int, int] = field(default_factory=dict)
    """Number of response tokens that the broker has, by lease id: the holder has to report the later tokens again."""
    rejects: list[tuple[int, str]] = field(default_factory=list)
    """(lease id, reason) of reports that were not accepted."""
    leases: list[GrantBuilder] = field(default_factory=list)

    def new_leases(self) -> GrantBuilder:
        """The `Grants` message to which the next grant is added; a new one if the last is full."""
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
    """Session id, never reused in a run."""
    role: str
    name: str
    uid: str
    """Unique id of the process, under which its leases are recorded."""
    data_route: bytes
    last_seen: float
    """Time of the peer's last message, Unix seconds."""
    control_route: bytes | None = None
    """ZeroMQ route of the control connection; None before the connection is bound, empty after the peer's connections
    were lost."""
    key: str = ""
    """CURVE public key of the peer's connections; empty without CURVE."""
    version: Version | None = None
    """Policy version of the weights that a worker has loaded; None before the first."""
    capacity: int = 0
    """Most leases that the peer holds at once."""
    address: str = ""
    """Base URL of an agents process's API."""
    image: tuple[str, bytearray] = field(default_factory=lambda: ("", bytearray()))
    """(name, bytes so far) of the image that the peer is uploading in parts."""
    token_scores: tuple[int, bytes] = 0, b""
    """(lease id, values so far) of a score whose token scores are split over several reports."""
    started: bool = False
    """Whether the peer, a learner, has said with `StartLearner` from which checkpoint it starts. Its other messages are
    refused before."""
    sent_bytes: int = 0
    """Bytes of arrays sent to the peer in this session."""
    received_bytes: int = 0
    """Bytes of arrays that the peer reports to have received in this session."""
    pending: PendingAnswers = field(default_factory=PendingAnswers)
    """Answers and grants that the peer gets after the next sync."""
    loop_position: str = ""
    """Stage that the peer's main loop is in; empty if the peer does not report it."""
    loop_since: float = 0.0
    """Time at which the peer's main loop entered the stage `loop_position`, Unix seconds."""
    loop_usual_s: float = 0.0
    """Median of the seconds that the peer's main loop has stayed in the stage `loop_position` at earlier times; 0 if
    unknown."""
    slots: wire.Slots | None = None
    """Use of a worker's slots, as last reported in a heartbeat; None if never."""
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
        """Count accepted tokens for the worker's tokens per second."""
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
    """Number of tokens that the worker's engine has sampled, by the worker's own count."""
    acknowledged: int = 0
    refused: int = 0

    @property
    def lost(self) -> int:
        """Number of tokens sampled, but neither acknowledged nor refused."""
        return max(0, self.emitted - self.acknowledged - self.refused)


@dataclass(slots=True)
class Outgoing:
    """A message queued for sending."""

    route: bytes
    message: wire.Message
    arrays: list[np.ndarray | wire.PackedArray] = field(default_factory=list)
    session: int = 0
    """Session id in the message's header; 0 for a connection without a session."""
    sequence: int = 0
    """Sequence number of the request that the message answers; 0 if it answers none."""
    protocol: int = wire.PROTOCOL
    """Protocol version in the message's header; differs from this April's only to refuse a peer of that version."""


class Peers:
    """All connected peers, and the messages that wait to be sent to them."""

    def __init__(self):
        self.by_id: dict[int, Peer] = {}
        self.tallies: dict[str, TokenTally] = {}
        """Token counts by uid of the worker process."""
        self.forgotten = TokenTally()
        """Token counts of the worker processes that were dropped from `tallies`, in total: `emitted` is the number of
        tokens that they generated and the broker never received, `refused` that of tokens that the broker refused."""
        self.refusals: Counter[str] = Counter()
        """Number of messages and reports that were not accepted, by cause."""
        self.outgoing: list[Outgoing] = []
        """Messages to send after the journal's next sync."""
        self.immediate: list[Outgoing] = []
        """Messages to send at once: they depend only on events that are on disk, so that they need not wait for a
        sync."""
        self._next_id = 1
        self._with_pending: dict[int, Peer] = {}

    def start_ids(self, broker_start: int) -> None:
        """Set the first session id for start number `broker_start` of the broker, so that no id of an earlier start is
        reused."""
        self._next_id = (broker_start << SESSION_BITS) + 1

    def open(self, hello: wire.Hello, route: bytes, now: float, key: str = "") -> Peer:
        peer = Peer(self._next_id, hello.role, hello.name, hello.uid, route, now, key=key)
        self.by_id[peer.id] = peer
        self._next_id += 1
        if peer.uid not in self.tallies:
            self.tallies[peer.uid] = TokenTally(acknowledged=hello.acknowledged_tokens)
            self._fold_tallies()
        return peer

    def limit_reached(self, hello: wire.Hello, key_owner: KeyOwner | None, most: int, most_by_key: int) -> str:
        """Name of the configuration key whose limit forbids the process of `hello` a session; "" if it may have one.
        `most`: limit on all sessions, those reserved for other roles (`RESERVED_FOR`) included; `most_by_key`: limit
        per CURVE key, or per role without CURVE."""
        if any((peer.role, peer.uid) == (hello.role, hello.uid) for peer in self.by_id.values()):
            return ""
        alike = Counter((peer.key or peer.role) for peer in self.by_id.values())
        roles = Counter(peer.role for peer in self.by_id.values())
        others = [names for names in RESERVED_FOR if hello.role not in names]
        unused = (max(0, most // RESERVED_SHARE - sum(roles[name] for name in names)) for names in others)
        if roles.total() + sum(unused) >= most:
            return "security.max_sessions"
        is_full = alike[key_owner.key if key_owner else hello.role] >= most_by_key
        return "security.max_key_sessions" if is_full else ""

    def close_earlier(self, peer: Peer) -> None:
        """Close the earlier sessions of a monitor, or of a machine of the learner (role `node`), whose process has
        opened a new session, `peer`."""
        for other in list(self.by_id.values()):
            if other is not peer and other.role == peer.role and other.uid == peer.uid:
                self.close(other)

    def _fold_tallies(self) -> None:
        """Once there are more than `limits.MAX_TALLIES` token counts of worker processes (`tallies`), drop those of
        processes that are gone, the oldest first; their sums stay in `forgotten`."""
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
        """Handle a lost connection at `route`, on which messages may have been lost: forget both connections of its
        session until the peer says hello again."""
        for peer in self.by_id.values():
            if route in (peer.data_route, peer.control_route):
                peer.data_route = peer.control_route = b""

    def unacknowledged_tokens(self) -> int:
        """Number of tokens sampled by workers that are gone, and neither acknowledged nor refused."""
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
        """The connected lease holder with this process uid; None if there is none."""
        return next((peer for peer in self.by_id.values() if peer.uid == uid and peer.role in HOLDERS), None)

    def send(
        self,
        peer: Peer,
        message: wire.Message,
        arrays: Sequence[np.ndarray | wire.PackedArray] = (),
        sequence: int = 0,
    ) -> None:
        """Queue a message for a peer's data connection, to be sent after the next sync and behind messages queued
        earlier. `sequence`: number of the request that it answers; 0 for none."""
        peer.sent_bytes += sum(len(a.data) if isinstance(a, wire.PackedArray) else a.nbytes for a in arrays)
        self.outgoing.append(Outgoing(peer.data_route, message, list(arrays), peer.id, sequence))

    def send_now(self, peer: Peer, message: wire.Message, arrays: list[wire.PackedArray], sequence: int = 0) -> None:
        """Queue a message that depends only on events that are on disk, so that it need not wait for a sync.
        `sequence`: number of the request that it answers; 0 for none."""
        peer.sent_bytes += sum(len(packed.data) for packed in arrays)
        self.immediate.append(Outgoing(peer.data_route, message, list(arrays), peer.id, sequence))

    def refuse(self, cause: str, reason: str, route: bytes, session: int = 0, sequence: int = 0) -> None:
        """Count, by `cause`, a message that is not accepted, and queue a `Refused` with `reason` in answer. `cause` is
        never a peer's own text; `route`, `session`, `sequence`: those of the message."""
        self.refusals[cause] += 1
        self.outgoing.append(Outgoing(route, wire.Refused(reason), [], session, sequence))

    def has_credit(self, peer: Peer, credit_bytes: int) -> bool:
        """Whether fewer than `credit_bytes` of the arrays sent to a peer are unacknowledged; one message may exceed the
        credit."""
        return peer.sent_bytes - peer.received_bytes < credit_bytes

    def pending_for(self, peer: Peer) -> PendingAnswers:
        """The answers that a peer gets after the next sync; callers add to them."""
        self._with_pending[peer.id] = peer
        return peer.pending

    def acknowledge(self, peer: Peer, lease_id: int, length: int | None = None) -> None:
        """Queue an ack of the first `length` response tokens of a lease; with None, an ack of the lease's end."""
        pending = self.pending_for(peer)
        if length is None:
            pending.done.append(lease_id)
        else:
            pending.acks[lease_id] = length

    def nack(self, peer: Peer, lease_id: int, length: int) -> None:
        """Queue a nack: the holder has to report a lease's response tokens from `length` on again."""
        self.pending_for(peer).nacks[lease_id] = length

    def reject(self, peer: Peer, lease_id: int, reason: str) -> None:
        """Queue a reject of the report on a lease. It is counted under the part of the reason before the colon."""
        self.refusals[reason.split(":")[0]] += 1
        self.pending_for(peer).rejects.append((lease_id, reason))

    def take_outgoing(self) -> list[Outgoing]:
        """Take the queued messages, grouped by connection: first the answers to the peer's reports, then the others."""
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
        """Answer a heartbeat with the ids of the leases that the holder has lost (`lost`). It need not wait for a sync,
        since no crash can make the answer wrong: a lost lease stays lost."""
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
        """Refuse a peer of another protocol version, with a message in the peer's version. `reason`: text for the peer;
        `route`: its connection."""
        self.refusals[error.cause] += 1
        self.outgoing.append(Outgoing(route, wire.Refused(reason), protocol=error.protocol))

    def broadcast(self, message: wire.Message) -> None:
        """Queue a message for the control connection of every lease holder."""
        for peer in self.holders():
            self.send_control(peer, message)
