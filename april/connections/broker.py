"""A peer's end of the conversation with the broker: two connections, one session. The control connection has a thread
of its own, which says that the peer lives."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import zmq

from april import wire
from april.connections import sockets
from april.connections.address import address_at
from april.connections.control import Control
from april.formats.versions import protocols_differ
from april.processes import clock
from april.processes.pulse import MAIN
from april.security.handshake import Handshake
from april.security.keys import Keys
from april.wire.limits import FROM_BROKER

log = logging.getLogger(__name__)

REPORT_BYTES = 8 << 20
"""what has arrived is reported after so much at the latest, well before the broker's credit is used up"""
SILENT_S = 5.0
"""without an answer to any of its heartbeats, a peer takes the broker to be away"""
BEAT_OVER_DATA_S = 5.0
"""a heartbeat goes over the data connection this often: a broker to which that connection is new says so"""
HELLO_AGAIN_S = 5.0
"""a hello that a dying broker took with it is said again after this long"""


class BrokerUnreachable(RuntimeError):
    """Nobody answers at the broker's address."""


class BrokerRefused(RuntimeError):
    """The broker refuses what this peer asks; the text says why."""


class AccessDenied(BrokerUnreachable):
    """The broker answers, but not to this peer; trying again changes nothing."""


class BrokerConnection:
    """Owned by one thread, which calls `receive` or `request` when it comes to that; `patience_s`: how long a silent
    broker may be away, say for a restart, before BrokerUnreachable is raised.

    connection = BrokerConnection("tcp://127.0.0.1:5555", role="worker", name="worker-0", uid="...", patience_s=600)
    welcome = connection.hello(leases=[])
    connection.send(wire.Holding(version, capacity=64))
    connection.hold(leases, emitted_tokens)
    for received in connection.receive(timeout_ms=20):
        ...
    """

    def __init__(
        self, address: str, role: str, name: str, uid: str, patience_s: float = 600.0, keys: Keys | None = None
    ):
        """`address`: or the run's folder, in which the broker will write it; `keys`: this peer's, where the broker
        wants some. Raises BrokerUnreachable where it has not written it within the patience."""
        try:
            self.address = address_at(address, patience_s)
        except TimeoutError as error:
            raise BrokerUnreachable(str(error)) from None
        self.role, self.name, self.uid = role, name, uid
        self.patience_s = patience_s
        self.received_bytes = self._reported_bytes = 0
        """of arrays in this session, and how many of them were told over data or told of"""
        self._sequence = 0
        self._next_beat = 0.0
        self._context = zmq.Context()
        self._handshakes: list[Handshake] = []
        self._data = self._connect(keys)
        self._control = Control(self._connect(keys))
        self._control.start()
        self._poller = zmq.Poller()
        self._poller.register(self._data, zmq.POLLIN)
        self._poller.register(self._control.arrived, zmq.POLLIN)

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

    @property
    def session(self) -> int:
        """0: none."""
        return self._control.session

    def hello(self, leases: list[int], acknowledged_tokens: int = 0, timeout_s: float | None = None) -> wire.Welcome:
        """Open a session, or open it anew. Raises BrokerUnreachable after `timeout_s`, by default the patience."""
        self.forget()
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
        self.begin(welcome)
        return welcome

    def begin(self, welcome: wire.Welcome) -> None:
        """The session that a hello has got: the broker hears of this peer from now on."""
        self.received_bytes = self._reported_bytes = self._control.received_bytes = 0
        self._next_beat = clock.now() + BEAT_OVER_DATA_S
        self._control.begin(welcome.session, welcome.renew_s)

    def forget(self) -> None:
        """The session is over; the next hello opens another."""
        self._control.session = 0

    def hold(self, leases: Iterable[int], emitted_tokens: int = 0) -> None:
        """What this peer works on from now on, and has sampled since its process started; the broker is told now and
        then, whatever the calling thread does meanwhile."""
        self._control.leases, self._control.emitted_tokens = list(leases), emitted_tokens

    def occupy(self, slots: wire.Slots) -> None:
        """What a worker's samples are at from now on; the broker is told as it is of leases."""
        self._control.slots = slots

    def goodbye(self) -> None:
        """Leave; nothing is said any more."""
        session, self._control.session = self.session, 0
        self._sequence += 1
        self._send(self._data, wire.encode(wire.Goodbye(), (), session, self._sequence))

    def send(self, message: wire.Message, arrays: Sequence[np.ndarray] = ()) -> int:
        """Queue a message on the data connection; returns its sequence number."""
        self._sequence += 1
        self._send(self._data, wire.encode(message, arrays, self.session, self._sequence))
        return self._sequence

    def send_control(self, message: wire.Message) -> None:
        self._control.send(wire.encode(message, (), self.session))

    def _send(self, socket: zmq.Socket, frames: list) -> None:
        try:
            sockets.send(socket, frames, wait=True)
        except zmq.Again:
            self._check_handshakes()
            raise BrokerUnreachable(f"the broker at {self.address} takes no messages; is it running?") from None

    def is_disowned(self, received: wire.Received) -> bool:
        """Whether the broker does not know this session (any more): say hello again."""
        refused = isinstance(received.message, wire.Refused) and "unknown session" in received.message.reason
        return refused and received.session == self.session

    def receive(self, timeout_ms: int = 0) -> Iterator[wire.Received]:
        """What has arrived on both connections, waiting at most `timeout_ms` for the first. Raises AccessDenied."""
        arrived = self._poller.poll(timeout_ms)
        if self.session and clock.now() >= self._next_beat:
            self._beat()
        if not arrived:
            return
        try:
            for received in self._control.take():
                yield self._look_at(received)
            while sockets.has_message(self._data):
                self._control.heard_at = clock.now()
                yield self._look_at(wire.decode(sockets.receive(self._data)))
        except wire.OtherProtocol as error:
            raise self._denied(protocols_differ("the broker", error.protocol, f"this {self.role}")) from None

    def _look_at(self, received: wire.Received) -> wire.Received:
        message = received.message
        if isinstance(message, wire.Refused) and message.reason.startswith(wire.DENIED):
            raise self._denied(message.reason.removeprefix(wire.DENIED))
        self.received_bytes += received.array_bytes
        self._control.received_bytes = self.received_bytes
        if self.session and self.received_bytes - self._reported_bytes >= REPORT_BYTES:
            self._beat()
        return received

    def _beat(self) -> None:
        """Say over data what the control connection says every second."""
        self._next_beat, self._reported_bytes = clock.now() + BEAT_OVER_DATA_S, self.received_bytes
        self.send(wire.Heartbeat([], self._control.emitted_tokens, self.received_bytes))

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
        self._control.heard_at = clock.now()
        while clock.now() < deadline:
            MAIN.at("waiting for the broker")
            for received in self.receive(timeout_ms=200):
                if received.sequence == sequence or (self.session and self.is_disowned(received)):
                    return received
            self.check_alive()
        return None

    @property
    def is_silent(self) -> bool:
        """Whether the broker seems to be away: what is sent now only waits in a queue of so many messages."""
        return clock.now() - self._control.heard_at > SILENT_S

    def wake_by(self, descriptor: int) -> None:
        """Let `receive` return early when the descriptor can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def check_alive(self) -> None:
        """Raise BrokerUnreachable if the broker, which answers every heartbeat, is silent for too long, or closed."""
        self._check_handshakes()
        if clock.now() - self._control.heard_at > self.patience_s:
            raise BrokerUnreachable(f"the broker at {self.address} is silent for {self.patience_s:g} s; is it running?")

    def _check_handshakes(self) -> None:
        """Raise AccessDenied where the broker turns this peer away."""
        for handshake in self._handshakes:
            if problem := handshake.problem():
                raise self._denied(problem)

    def close(self) -> None:
        self._control.end()
        for handshake in self._handshakes:
            handshake.close()
        self._data.close()
        self._control.socket.close()
        self._context.term()
