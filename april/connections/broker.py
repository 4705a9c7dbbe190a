"""A peer's end of the conversation with the broker: two connections, one session."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import zmq

from april import wire
from april.connections import sockets
from april.formats.versions import protocols_differ
from april.processes import clock
from april.security.handshake import Handshake
from april.security.keys import Keys
from april.wire.limits import FROM_BROKER

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
REPORT_BYTES = 8 << 20
"""what has arrived is reported after so much at the latest, well before the broker's credit is used up"""
SILENT_S = 5.0
"""without an answer to any of its heartbeats, a peer takes the broker to be away"""
BEATS_OVER_DATA = 5
"""every so many heartbeats one goes over the data connection: a broker to which that connection is new says so"""
HELLO_AGAIN_S = 5.0
"""a hello that a dying broker took with it is said again after this long"""


class BrokerUnreachable(RuntimeError):
    """Nobody answers at the broker's address."""


class BrokerRefused(RuntimeError):
    """The broker refuses what this peer asks; the text says why."""


class AccessDenied(BrokerUnreachable):
    """The broker answers, but not to this peer; trying again changes nothing."""


class BrokerConnection:
    """Owned by one thread, which keeps calling `receive` or `request`; `patience_s`: how long a silent broker may
    be away, say for a restart, before BrokerUnreachable is raised.

    connection = BrokerConnection("tcp://127.0.0.1:5555", role="worker", name="worker-0", uid="...", patience_s=600)
    welcome = connection.hello(leases=[])
    connection.send(wire.Holding(version, capacity=64))
    for received in connection.receive(timeout_ms=20):
        ...
    """

    def __init__(
        self, address: str, role: str, name: str, uid: str, patience_s: float = 600.0, keys: Keys | None = None
    ):
        """`keys`: this peer's, where the broker wants some."""
        self.address, self.role, self.name, self.uid = address, role, name, uid
        self.patience_s = patience_s
        self.session = 0
        self.received_bytes = self._reported_bytes = 0
        """of arrays in this session, and how many of them the broker was told of"""
        self.heard_at = clock.now()
        self._sequence = 0
        self._beats = 0
        self._next_beat = 0.0
        self._context = zmq.Context()
        self._handshakes: list[Handshake] = []
        self._data = self._connect(keys)
        self._control = self._connect(keys)
        self._poller = zmq.Poller()
        self._poller.register(self._data, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)

    def _connect(self, keys: Keys | None) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.SNDTIMEO, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, FROM_BROKER.frame_bytes)
        self._handshakes.append(Handshake(socket, keys, keys.broker if keys else ""))
        socket.connect(self.address)
        return socket

    def hello(self, leases: list[int], acknowledged_tokens: int = 0, timeout_s: float | None = None) -> wire.Welcome:
        """Open a session, or open it anew. Raises BrokerUnreachable after `timeout_s`, by default the patience."""
        self.session = self.received_bytes = self._reported_bytes = 0
        deadline = clock.now() + (timeout_s or self.patience_s)
        received = None
        while received is None:
            if clock.now() >= deadline:
                raise BrokerUnreachable(f"no broker answers at {self.address}; is it running?")
            sequence = self.send(wire.Hello(self.role, self.name, self.uid, leases, acknowledged_tokens))
            received = self._await(sequence, min(deadline, clock.now() + HELLO_AGAIN_S))
        welcome = received.message
        if not isinstance(welcome, wire.Welcome):
            raise BrokerUnreachable(f"the broker at {self.address} refuses this {self.role}: {welcome.reason}")
        self.session, self.received_bytes, self._reported_bytes = welcome.session, 0, 0
        self.send_control(wire.Bind())
        return welcome

    def send(self, message: wire.Message, arrays: Sequence[np.ndarray] = ()) -> int:
        """Queue a message on the data connection; returns its sequence number."""
        self._sequence += 1
        self._send(self._data, wire.encode(message, arrays, self.session, self._sequence))
        return self._sequence

    def send_control(self, message: wire.Message) -> None:
        self._send(self._control, wire.encode(message, (), self.session))

    def _send(self, socket: zmq.Socket, frames: list) -> None:
        try:
            sockets.send(socket, frames, wait=True)
        except zmq.Again:
            raise BrokerUnreachable(f"the broker at {self.address} takes no messages; is it running?") from None

    def is_disowned(self, received: wire.Received) -> bool:
        """Whether the broker does not know this session (any more): say hello again."""
        refused = isinstance(received.message, wire.Refused) and "unknown session" in received.message.reason
        return refused and received.session == self.session

    def receive(self, timeout_ms: int = 0) -> Iterator[wire.Received]:
        """What has arrived on both connections, waiting at most `timeout_ms` for the first. Raises AccessDenied."""
        if not self._poller.poll(timeout_ms):
            return
        for socket in (self._control, self._data):
            while sockets.has_message(socket):
                self.heard_at = clock.now()
                try:
                    received = wire.decode(sockets.receive(socket))
                except wire.OtherProtocol as error:
                    reason = protocols_differ("the broker", error.protocol, f"this {self.role}")
                    raise self._denied(reason) from None
                if isinstance(received.message, wire.Refused) and received.message.reason.startswith(wire.DENIED):
                    raise self._denied(received.message.reason.removeprefix(wire.DENIED))
                self.received_bytes += received.array_bytes
                if self.received_bytes - self._reported_bytes >= REPORT_BYTES:
                    self.beat()
                yield received

    def _denied(self, why: str) -> AccessDenied:
        return AccessDenied(f"the broker at {self.address} does not let this {self.role} in: {why}")

    def request(self, message: wire.Message, timeout_s: float | None = None) -> wire.Received:
        """Send and wait for the answer, None: as long as the broker lives. Raises BrokerUnreachable.

        To a broker that has been restarted meanwhile, hello and then the message are said again, so the message
        must be one that may be repeated.
        """
        return self.request_parts(message, lambda answers: True, timeout_s)[0]

    def request_parts(
        self, message: wire.Message, whole: Callable[[list[wire.Received]], bool], timeout_s: float | None = None
    ) -> list[wire.Received]:
        """The same for an answer that comes in parts, until it is `whole`."""
        deadline = clock.now() + (math.inf if timeout_s is None else timeout_s)
        sequence = self.send(message)
        answers: list[wire.Received] = []
        while answer := self._await(sequence, deadline):
            if self.is_disowned(answer):
                log.info("the broker does not know this %s any more; saying hello again", self.role)
                self.hello(leases=[])
                sequence, answers = self.send(message), []
                continue
            answers.append(answer)
            if whole(answers):
                return answers
        raise BrokerUnreachable(f"the broker at {self.address} does not answer within {timeout_s:g} s; is it running?")

    def _await(self, sequence: int, deadline: float) -> wire.Received | None:
        """The answer to `sequence`, or the news that the session has ended; None at the deadline."""
        self.heard_at = self._next_beat = clock.now()
        while clock.now() < deadline:
            for received in self.receive(timeout_ms=200):
                if received.sequence == sequence or (self.session and self.is_disowned(received)):
                    return received
            if self.session:
                self.beat_if_due()
            self.check_alive()
        return None

    @property
    def is_silent(self) -> bool:
        """Whether the broker seems to be away: what is sent now only waits in a queue of so many messages."""
        return clock.now() - self.heard_at > SILENT_S

    def wake_by(self, descriptor: int) -> None:
        """Let `receive` return early when the descriptor can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def beat_if_due(self) -> None:
        """A heartbeat without leases, if the last one is HEARTBEAT_S ago."""
        if clock.now() >= self._next_beat:
            self._next_beat = clock.now() + HEARTBEAT_S
            self.beat()

    def beat(self, leases: Sequence[int] = (), emitted_tokens: int = 0) -> None:
        """Say that this peer lives, renew leases, and give the broker credit for what has arrived; due every
        HEARTBEAT_S."""
        heartbeat = wire.Heartbeat(list(leases), emitted_tokens, self.received_bytes)
        self._reported_bytes = self.received_bytes
        self._beats += 1
        if self._beats % BEATS_OVER_DATA:
            self.send_control(heartbeat)
        else:
            self.send(heartbeat)

    def check_alive(self) -> None:
        """Raise BrokerUnreachable if the broker, which answers every heartbeat, is silent for too long, or closed."""
        for handshake in self._handshakes:
            if problem := handshake.problem():
                raise self._denied(problem)
        if clock.now() - self.heard_at > self.patience_s:
            raise BrokerUnreachable(f"the broker at {self.address} is silent for {self.patience_s:g} s; is it running?")

    def close(self) -> None:
        for handshake in self._handshakes:
            handshake.close()
        self._data.close()
        self._control.close()
        self._context.term()
