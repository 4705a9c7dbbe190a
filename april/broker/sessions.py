"""Who is connected: one session per peer, with a data and a control connection, and what it was last known to do."""

from dataclasses import dataclass, field

import numpy as np

from april import wire
from april.version import Version


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
    version: Version | None = None
    capacity: int = 0
    emitted_tokens: int = 0
    """sampled by its engine, by its own count"""
    acknowledged_tokens: int = 0
    refused_tokens: int = 0
    recent: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of the chunks of the last seconds"""

    @property
    def unacknowledged_tokens(self) -> int:
        return max(0, self.emitted_tokens - self.acknowledged_tokens - self.refused_tokens)

    def tokens_per_s(self, now: float, window_s: float = 5.0) -> float:
        self.recent = [(at, tokens) for at, tokens in self.recent if at > now - window_s]
        return sum(tokens for _, tokens in self.recent) / window_s


@dataclass(slots=True)
class Outgoing:
    """A message that leaves after the journal's next sync."""

    route: bytes
    message: wire.Message
    arrays: list[np.ndarray] = field(default_factory=list)
    session: int = 0
    sequence: int = 0


class Sessions:
    def __init__(self):
        self.by_id: dict[int, Session] = {}
        self.outgoing: list[Outgoing] = []
        self._next = 1

    def open(self, hello: wire.Hello, route: bytes, now: float) -> Session:
        session = Session(self._next, hello.role, hello.name, hello.uid, route, now)
        self.by_id[session.id] = session
        self._next += 1
        return session

    def close(self, session: Session) -> None:
        self.by_id.pop(session.id, None)

    def workers(self) -> list[Session]:
        return [session for session in self.by_id.values() if session.role == "worker"]

    def of_role(self, role: str) -> Session | None:
        return next((session for session in self.by_id.values() if session.role == role), None)

    def of_uid(self, uid: str) -> Session | None:
        return next((session for session in self.by_id.values() if session.uid == uid), None)

    def send(self, session: Session, message: wire.Message, arrays: list[np.ndarray] = (), sequence: int = 0) -> None:
        """To the data connection, in order behind what was sent there before."""
        self.outgoing.append(Outgoing(session.data_route, message, list(arrays), session.id, sequence))

    def send_control(self, session: Session, message: wire.Message) -> None:
        """To the control connection, past whatever queues on the other one."""
        self.outgoing.append(Outgoing(session.control_route or session.data_route, message, [], session.id))

    def broadcast(self, message: wire.Message) -> None:
        """To every worker."""
        for session in self.workers():
            self.send_control(session, message)
