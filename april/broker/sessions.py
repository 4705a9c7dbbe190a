"""Who is connected: one session per peer, with a data and a control connection, and what it was last known to do."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from april import wire
from april.wire import limits
from april.wire.version import Version

HOLDERS = ("worker", "scorer", "agents")
"""roles that hold leases"""
PACE_S = 5.0
"""window over which a worker's speed is told"""


class Stay(NamedTuple):
    """Where a peer's main loop is."""

    peer: str
    place: str
    for_s: float
    usual_s: float
    """0: unknown"""


@dataclass(slots=True)
class NewLeases:
    """A message of grants in the making."""

    places: dict[int, int] = field(default_factory=dict)
    """of the tasks, by group"""
    tasks: list[wire.Task] = field(default_factory=list)
    grants: list[wire.Grant] = field(default_factory=list)
    prompts: list[wire.Packed] = field(default_factory=list)
    responses: list[wire.Packed] = field(default_factory=list)

    def add_task(self, task: wire.Task, prompt: wire.Packed) -> int:
        """Returns its place."""
        self.tasks.append(task)
        self.prompts.append(prompt)
        return self.places.setdefault(task.group, len(self.tasks) - 1)

    def add(self, grant: wire.Grant, responses: list[wire.Packed]) -> None:
        self.grants.append(grant)
        self.responses += responses

    @property
    def arrays(self) -> list[wire.Packed]:
        return [*self.prompts, *self.responses]


@dataclass(slots=True)
class Answers:
    """What a holder of leases is told after the journal's next sync: what became of its reports, and new leases."""

    lengths: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    resend: dict[int, int] = field(default_factory=dict)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """as in `wire.Answers`, by lease"""
    leases: list[NewLeases] = field(default_factory=list)

    def new_leases(self) -> NewLeases:
        """The message to which the next grant is added."""
        if not self.leases or len(self.leases[-1].responses) >= limits.GRANT_ARRAYS:
            self.leases.append(NewLeases())
        return self.leases[-1]

    def messages(self) -> Iterator[tuple[wire.Message, list[wire.Packed]]]:
        """With their arrays."""
        if self.lengths or self.done or self.resend or self.refused:
            lengths, resend = list(self.lengths.items()), list(self.resend.items())
            yield wire.Answers(lengths, self.done, resend, self.refused), []
        for leases in self.leases:
            yield wire.Grants(leases.tasks, leases.grants), leases.arrays


@dataclass(slots=True)
class Session:
    id: int
    role: str
    name: str
    uid: str
    """of the process: the holder of its leases"""
    data_route: bytes
    last_seen: float
    control_route: bytes | None = None
    """None before it is bound, empty once its connections are gone"""
    key: str = ""
    """CURVE key of its connections, "" without CURVE"""
    version: Version | None = None
    capacity: int = 0
    address: str = ""
    """base URL of the API of an agents process"""
    started: bool = False
    """a learner that has said which checkpoint it holds"""
    sent_bytes: int = 0
    received_bytes: int = 0
    """of arrays: what was sent to it, and what it says has reached it"""
    answers: Answers = field(default_factory=Answers)
    """what it is told next of its leases"""
    place: str = ""
    place_since: float = 0.0
    usual_s: float = 0.0
    """where its main loop is, since when, and how long that usually takes; "" where it does not say"""
    slots: wire.Slots | None = None
    """what a worker's samples are at, as it has said last"""
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, tokens) of the chunks of the last seconds"""

    def hear(self, beat: wire.Heartbeat, now: float) -> None:
        self.received_bytes = max(self.received_bytes, beat.received_bytes)
        if beat.place:
            self.place, self.place_since, self.usual_s = beat.place, now - beat.for_s, beat.usual_s

    def stay(self, now: float) -> Stay:
        return Stay(self.name, self.place, now - self.place_since if self.place else 0.0, self.usual_s)

    def acknowledged(self, now: float, tokens: int) -> None:
        self.recent.append((now, tokens))
        while self.recent[0][0] < now - PACE_S:
            self.recent.popleft()

    @property
    def step(self) -> int:
        """Of the version that it holds; -1 for none."""
        return -1 if self.version is None else self.version.step

    def tokens_per_s(self, now: float) -> float:
        return sum(tokens for at, tokens in self.recent if at > now - PACE_S) / PACE_S


@dataclass(slots=True)
class Tally:
    """Tokens of one worker process, over all its sessions."""

    emitted: int = 0
    """sampled by its engine, by its own count"""
    acknowledged: int = 0
    refused: int = 0

    @property
    def lost(self) -> int:
        """Sampled, and neither acknowledged nor refused."""
        return max(0, self.emitted - self.acknowledged - self.refused)


@dataclass(slots=True)
class Outgoing:
    """A message that leaves after the journal's next sync."""

    route: bytes
    message: wire.Message
    arrays: list[np.ndarray | wire.Packed] = field(default_factory=list)
    session: int = 0
    sequence: int = 0
    protocol: int = wire.PROTOCOL
    """of a peer that speaks another one, and is told so"""


class Sessions:
    def __init__(self):
        self.by_id: dict[int, Session] = {}
        self.tallies: dict[str, Tally] = {}
        """by the uid of the worker process"""
        self.folded = Tally()
        """of processes that left long ago: `emitted` holds what was neither acknowledged nor refused"""
        self.refusals: Counter[str] = Counter()
        """messages that were not accepted, by cause: one for each `Refused`"""
        self.outgoing: list[Outgoing] = []
        self.at_once: list[Outgoing] = []
        self._next = 1
        self._answered: dict[int, Session] = {}

    def number_from(self, start: int) -> None:
        """A session's number is never used again, not even by a restarted broker."""
        self._next = (start << 32) + 1

    def open(self, hello: wire.Hello, route: bytes, now: float, key: str = "") -> Session:
        session = Session(self._next, hello.role, hello.name, hello.uid, route, now, key=key)
        self.by_id[session.id] = session
        self._next += 1
        if session.uid not in self.tallies:
            self.tallies[session.uid] = Tally(acknowledged=hello.acknowledged_tokens)
            self._fold_tallies()
        return session

    def _fold_tallies(self) -> None:
        """Forget which process it was that left first; what it had sampled in vain stays counted."""
        if len(self.tallies) <= limits.TALLIES:
            return
        here = {session.uid for session in self.by_id.values()}
        for uid in [uid for uid in self.tallies if uid not in here][: limits.TALLIES // 2]:
            tally = self.tallies.pop(uid)
            self.folded.emitted += tally.lost
            self.folded.refused += tally.refused

    def close(self, session: Session) -> None:
        self.by_id.pop(session.id, None)

    def void(self, route: bytes) -> None:
        """A connection is gone and what was sent over it may be lost: nothing of its session counts until a hello."""
        for session in self.by_id.values():
            if route in (session.data_route, session.control_route):
                session.data_route = session.control_route = b""

    def unacknowledged_tokens(self) -> int:
        """Tokens that workers which have left or were lost had sampled and never got acknowledged."""
        here = {session.uid for session in self.by_id.values()}
        gone = (tally for uid, tally in self.tallies.items() if uid not in here)
        return self.folded.emitted + sum(tally.lost for tally in gone)

    def refused_tokens(self) -> int:
        return self.folded.refused + sum(tally.refused for tally in self.tallies.values())

    def of(self, role: str) -> list[Session]:
        return [session for session in self.by_id.values() if session.role == role]

    def workers(self) -> list[Session]:
        return self.of("worker")

    def scorers(self) -> list[Session]:
        return self.of("scorer")

    def holders(self) -> list[Session]:
        """Of leases: workers, scorers and agents processes."""
        return [session for session in self.by_id.values() if session.role in HOLDERS]

    def of_role(self, role: str) -> Session | None:
        return next((session for session in self.by_id.values() if session.role == role), None)

    def of_uid(self, uid: str) -> Session | None:
        """The session of a process that holds leases."""
        return next((s for s in self.by_id.values() if s.uid == uid and s.role in HOLDERS), None)

    def send(
        self,
        session: Session,
        message: wire.Message,
        arrays: Sequence[np.ndarray | wire.Packed] = (),
        sequence: int = 0,
    ) -> None:
        """To the data connection, in order behind what was sent there before."""
        session.sent_bytes += sum(len(a.data) if isinstance(a, wire.Packed) else a.nbytes for a in arrays)
        self.outgoing.append(Outgoing(session.data_route, message, list(arrays), session.id, sequence))

    def send_at_once(
        self, session: Session, message: wire.Message, arrays: list[wire.Packed], sequence: int = 0
    ) -> None:
        """What rests on nothing that is not on disk."""
        session.sent_bytes += sum(len(packed.data) for packed in arrays)
        self.at_once.append(Outgoing(session.data_route, message, list(arrays), session.id, sequence))

    def refuse(self, cause: str, reason: str, route: bytes, session: int = 0, sequence: int = 0) -> None:
        """The answer to a message that is not accepted, and its counter; `cause` is never a peer's own text."""
        self.refusals[cause] += 1
        self.outgoing.append(Outgoing(route, wire.Refused(reason), [], session, sequence))

    def has_credit(self, session: Session, credit_bytes: int) -> bool:
        """Whether it has taken enough of what it was sent to be sent more; one message may exceed the credit."""
        return session.sent_bytes - session.received_bytes < credit_bytes

    def answers_to(self, session: Session) -> Answers:
        """What it is told next of its leases, to be added to."""
        self._answered[session.id] = session
        return session.answers

    def acknowledge(self, session: Session, lease_id: int, length: int | None = None) -> None:
        """The tokens of a lease below `length` are safe after the next sync, or its end is (None)."""
        answers = self.answers_to(session)
        if length is None:
            answers.done.append(lease_id)
        else:
            answers.lengths[lease_id] = length

    def ask_again(self, session: Session, lease_id: int, length: int) -> None:
        """For what lies behind that length."""
        self.answers_to(session).resend[lease_id] = length

    def refuse_report(self, session: Session, lease_id: int, reason: str) -> None:
        """What was reported of one lease is not accepted; counted by what the reason says before it is particular."""
        self.refusals[reason.split(":")[0]] += 1
        self.answers_to(session).refused.append((lease_id, reason))

    def take_outgoing(self) -> list[Outgoing]:
        """What is to be sent now, connection by connection: what became of its reports, then the rest."""
        by_route: dict[bytes, list[Outgoing]] = {}
        for session in self._answered.values():
            answers, session.answers = session.answers, Answers()
            for message, arrays in answers.messages():
                route = session.data_route
                by_route.setdefault(route, []).append(Outgoing(route, message, [*arrays], session.id))
        for outgoing in self.outgoing:
            by_route.setdefault(outgoing.route, []).append(outgoing)
        self._answered, self.outgoing = {}, []
        return [outgoing for of_route in by_route.values() for outgoing in of_route]

    def answer_heartbeat(self, session: Session, lost: list[int]) -> None:
        """At once, since no crash can make it wrong: a lease that is called lost is not taken up again."""
        route = session.control_route or session.data_route
        self.at_once.append(Outgoing(route, wire.Renewed(lost), [], session.id))

    def take_at_once(self) -> list[Outgoing]:
        """What need not wait for a sync."""
        at_once, self.at_once = self.at_once, []
        return at_once

    def send_control(self, session: Session, message: wire.Message) -> None:
        """To the control connection, past whatever queues on the other one."""
        self.outgoing.append(Outgoing(session.control_route or session.data_route, message, [], session.id))

    def refuse_protocol(self, error: wire.OtherProtocol, reason: str, route: bytes) -> None:
        """In the protocol of the peer, which understands nothing else."""
        self.refusals[error.cause] += 1
        self.outgoing.append(Outgoing(route, wire.Refused(reason), protocol=error.protocol))

    def broadcast(self, message: wire.Message) -> None:
        """To everybody who holds leases."""
        for session in self.holders():
            self.send_control(session, message)
