"""A peer's connection to the broker: two sockets, one session. The control socket has a thread of its own, which sends
heartbeats."""

import logging
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import zmq

from april import wire
from april.util import clock
from april.util.pulse import MAIN
from april.util.versions import protocols_differ
from april.wire.limits import FROM_BROKER
from april.wire.security.access import Handshake
from april.wire.security.keys import Keys
from april.wire.sockets import base
from april.wire.sockets.base import address_at
from april.wire.sockets.control import Control

log = logging.getLogger(__name__)

REPORT_BYTES = 8 << 20
"""Number of received array bytes after which the peer tells the broker its count. It is well below `broker.credit_mb`,
the bytes that the broker sends ahead of this count."""
SILENT_S = 5.0
"""Seconds without any message from the broker after which a peer takes the broker to be down."""
BEAT_OVER_DATA_S = 5.0
"""Interval of heartbeats over the data connection, which show whether the broker still knows that connection."""
HELLO_AGAIN_S = 5.0
"""Seconds without an answer after which a `Hello` is repeated: a broker that died may have lost the first one."""
LINGER_MS = 2000
"""Milliseconds that a connection that closes gives the broker to take what was sent."""
NAME_CHARACTERS = 90
"""Number of characters of a peer's name that its uid contains at most, so that the uid fits the wire type `Name`."""


class BrokerUnreachable(RuntimeError):
    """Raised if no broker answers at the address within the time limit of the call."""


class BrokerRefused(RuntimeError):
    """The broker refuses this peer's request; the text says why."""


class AccessDenied(BrokerUnreachable):
    """The broker does not admit this peer's key; retrying changes nothing."""


class BrokerConnection:
    """A session with the broker, used by one thread.

    `patience_s`: how long the broker may be silent, for example during a restart, before BrokerUnreachable is raised.

    connection = BrokerConnection("tcp://127.0.0.1:5555", role="worker", name="worker-0", uid="...", patience_s=600)
    welcome = connection.hello(lease_ids=[])
    connection.send(wire.WorkerCapacity(version, capacity=64))
    connection.hold(lease_ids, emitted_tokens)
    for received in connection.receive(timeout_ms=20):  # ends without one if none arrives within 20 ms
        ...
    """

    def __init__(
        self, address: str, role: str, name: str, uid: str, patience_s: float = 600.0, keys: Keys | None = None
    ):
        """`address`: address of the broker, or the run folder where the broker writes it. `keys`: this peer's CURVE
        keys, if the broker requires keys. Raises BrokerUnreachable if no address is written within `patience_s`.
        `role`, `name`: those of this peer; `uid`: unique id of its process (`new_uid`)."""
        try:
            self.address = address_at(address, patience_s)
        except TimeoutError as error:
            raise BrokerUnreachable(str(error)) from None
        self.role, self.name, self.uid = role, name, uid
        self.patience_s = patience_s
        self.received_bytes = self._reported_bytes = 0
        """Bytes of arrays received in this session. `_reported_bytes`: the count that was last sent to the broker in a
        heartbeat over the data connection."""
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

    def _connect(self, keys: Keys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
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
        """Id of the open session with the broker; 0 if none is open."""
        return self._control.session

    def hello(self, lease_ids: list[int], acknowledged_tokens: int = 0, timeout_s: float | None = None) -> wire.Welcome:
        """Open a session, which replaces an earlier one. Raises BrokerUnreachable if no broker answers within
        `timeout_s` seconds (default: `patience_s`).

        `lease_ids`: leases that this peer still works on. `acknowledged_tokens`: number of tokens of this process that
        the broker has acknowledged so far.
        """
        self.forget()
        deadline = clock.now() + (timeout_s or self.patience_s)
        received = None
        while received is None:
            if clock.now() >= deadline:
                raise BrokerUnreachable(f"no broker answers at {self.address}; is it running?")
            sequence = self.send(wire.Hello(self.role, self.name, self.uid, lease_ids, acknowledged_tokens))
            received = self._await(sequence, min(deadline, clock.now() + HELLO_AGAIN_S))
        welcome = received.message
        if not isinstance(welcome, wire.Welcome):
            raise BrokerUnreachable(f"the broker at {self.address} refuses this {self.role}: {welcome.reason}")
        self.begin(welcome)
        return welcome

    def begin(self, welcome: wire.Welcome) -> None:
        """Start heartbeats in the session that `welcome` has opened."""
        self.received_bytes = self._reported_bytes = self._control.received_bytes = 0
        self._next_beat = clock.now() + BEAT_OVER_DATA_S
        self._control.begin(welcome.session, welcome.renew_s)

    def forget(self) -> None:
        """Forget the session on the peer's side; the next hello opens another one."""
        self._control.session = 0

    def hold(self, lease_ids: Iterable[int], emitted_tokens: int = 0) -> None:
        """Set what heartbeats report: all leases of this peer, which they renew, and the number of tokens sampled since
        its process started."""
        self._control.lease_ids, self._control.emitted_tokens = list(lease_ids), emitted_tokens

    def occupy(self, slots: wire.Slots) -> None:
        """Set what heartbeats report about a worker's slots: how many samples wait for what."""
        self._control.slots = slots

    def goodbye(self) -> None:
        """Say goodbye and end the session."""
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

    def _send(self, socket: zmq.Socket[bytes], frames: list[Any]) -> None:
        try:
            base.send(socket, frames, wait=True)
        except zmq.Again:
            self._check_handshakes()
            raise BrokerUnreachable(f"the broker at {self.address} takes no messages; is it running?") from None

    def is_disowned(self, received: wire.Received) -> bool:
        """Whether the message `received` is a refusal because the broker no longer knows this peer's session: then the
        peer must say hello again."""
        refused = isinstance(received.message, wire.Refused) and "unknown session" in received.message.reason
        return refused and received.session == self.session

    def receive(self, timeout_ms: int = 0) -> Iterator[wire.Received]:
        """Messages from both sockets; waits at most `timeout_ms` for the first one. Raises AccessDenied."""
        arrived = self._poller.poll(timeout_ms)
        if self.session and clock.now() >= self._next_beat:
            self._beat()
        if not arrived:
            return
        try:
            for received in self._control.take():
                yield self._note_received(received)
            while base.has_message(self._data):
                self._control.heard_at = clock.now()
                yield self._note_received(wire.decode(base.receive(self._data)))
        except wire.ProtocolMismatch as error:
            raise self._denied(protocols_differ("the broker", error.protocol, f"this {self.role}")) from None

    def _note_received(self, received: wire.Received) -> wire.Received:
        message = received.message
        if isinstance(message, wire.Refused) and message.reason.startswith(wire.DENIED):
            raise self._denied(message.reason.removeprefix(wire.DENIED))
        self.received_bytes += received.array_bytes
        self._control.received_bytes = self.received_bytes
        if self.session and self.received_bytes - self._reported_bytes >= REPORT_BYTES:
            self._beat()
        return received

    def _beat(self) -> None:
        """Send a heartbeat over the data connection, in addition to those of the control connection."""
        self._next_beat, self._reported_bytes = clock.now() + BEAT_OVER_DATA_S, self.received_bytes
        self.send(wire.Heartbeat([], self._control.emitted_tokens, self.received_bytes))

    def _denied(self, why: str) -> AccessDenied:
        return AccessDenied(f"the broker at {self.address} does not let this {self.role} in: {why}")

    def request(self, message: wire.Message, timeout_s: float | None = None) -> wire.Received:
        """Send a message and wait for its answer. Raises BrokerUnreachable.

        `timeout_s`: None waits as long as the broker is alive. If the broker restarts meanwhile, hello and the message
        are sent again, so the message must be idempotent.
        """
        return self.request_parts(message, lambda answers: True, timeout_s)[0]

    def request_parts(
        self, message: wire.Message, is_complete: Callable[[list[wire.Received]], bool], timeout_s: float | None = None
    ) -> list[wire.Received]:
        """Send a request as `request` does, and return the messages of its answer, in order: all up to the one with
        which `is_complete(messages)` becomes true. `timeout_s`: as for `request`."""
        deadline = clock.now() + (math.inf if timeout_s is None else timeout_s)
        sequence = self.send(message)
        answers: list[wire.Received] = []
        while answer := self._await(sequence, deadline):
            if self.is_disowned(answer):
                log.info("the broker does not know this %s any more; saying hello again", self.role)
                self.hello(lease_ids=[])
                sequence, answers = self.send(message), []
                continue
            answers.append(answer)
            if is_complete(answers):
                return answers
        raise BrokerUnreachable(f"the broker at {self.address} does not answer within {timeout_s:g} s; is it running?")

    def _await(self, sequence: int, deadline: float) -> wire.Received | None:
        """Wait for the answer to the message with number `sequence`, or for the refusal that ends the session; None if
        neither has come by `deadline` (Unix time, seconds)."""
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
        """Whether no message has come from the broker for `SILENT_S`, so that further messages would only fill the send
        queue."""
        return clock.now() - self._control.heard_at > SILENT_S

    def wake_by(self, descriptor: int) -> None:
        """Have `receive` return before its timeout whenever the file descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def check_alive(self) -> None:
        """Raise BrokerUnreachable if the broker has been silent for `patience_s`, AccessDenied if it refuses this peer.

        A live broker answers every heartbeat.
        """
        self._check_handshakes()
        if clock.now() - self._control.heard_at > self.patience_s:
            raise BrokerUnreachable(f"the broker at {self.address} is silent for {self.patience_s:g} s; is it running?")

    def _check_handshakes(self) -> None:
        """Raise AccessDenied if a handshake shows that the broker does not admit this peer."""
        for handshake in self._handshakes:
            if problem := handshake.problem():
                raise self._denied(problem)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close both connections; wait at most `linger_ms` until what was sent has reached the broker's machine."""
        self._control.end()
        for handshake in self._handshakes:
            handshake.close()
        self._data.close(linger_ms)
        self._control.socket.close(linger_ms)
        self._context.term()


def new_uid(name: str) -> str:
    """A new unique id of a peer's process: the peer's name and a random part."""
    return f"{name[:NAME_CHARACTERS]}/{uuid.uuid4().hex}"


def name_of(uid: str) -> str:
    """The peer's name in a process uid; the whole uid if it has another form."""
    return uid.rpartition("/")[0] or uid
