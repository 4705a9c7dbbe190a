"""A peer's end of the conversation with the broker: two connections, one session."""

from collections.abc import Iterator

import numpy as np
import zmq

from april import clock, wire
from april.limits import FROM_BROKER
from april.security.handshake import Handshake
from april.security.keys import Keys

HEARTBEAT_S = 1.0
BROKER_SILENCE_S = 120.0
"""a peer gives up when the broker has not been heard of for this long"""


class BrokerUnreachable(RuntimeError):
    """Nobody answers at the broker's address."""


class AccessDenied(BrokerUnreachable):
    """The broker answers, but not to this peer; trying again changes nothing."""


class BrokerConnection:
    """Owned by one thread, which keeps calling `receive` or `request`; both let the broker know it is alive.

    connection = BrokerConnection("tcp://127.0.0.1:5555", role="worker", name="worker-0", uid="...")
    welcome = connection.hello(leases=[])
    connection.send(wire.Holding(version, capacity=64))
    for received in connection.receive(timeout_ms=20):
        ...
    """

    def __init__(self, address: str, role: str, name: str, uid: str, keys: Keys | None = None):
        """`keys`: this peer's, where the broker wants some."""
        self.address, self.role, self.name, self.uid = address, role, name, uid
        self.session = 0
        self.heard_at = clock.now()
        self._sequence = 0
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

    def hello(self, leases: list[int], acknowledged_tokens: int = 0, timeout_s: float = 30.0) -> wire.Welcome:
        """Open a session, or open it anew. Raises BrokerUnreachable after `timeout_s`."""
        self.session = 0
        sequence = self.send(wire.Hello(self.role, self.name, self.uid, leases, acknowledged_tokens))
        welcome = self._await(sequence, timeout_s).message
        if not isinstance(welcome, wire.Welcome):
            raise BrokerUnreachable(f"the broker at {self.address} refuses this {self.role}: {welcome.reason}")
        self.session = welcome.session
        self.send_control(wire.Bind())
        return welcome

    def send(self, message: wire.Message, arrays: list[np.ndarray] = ()) -> int:
        """Queue a message on the data connection; returns its sequence number."""
        self._sequence += 1
        self._send(self._data, wire.encode(message, arrays, self.session, self._sequence))
        return self._sequence

    def send_control(self, message: wire.Message) -> None:
        self._send(self._control, wire.encode(message, (), self.session))

    def _send(self, socket: zmq.Socket, frames: list) -> None:
        try:
            socket.send_multipart(frames, copy=False)
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
            while socket.poll(0):
                self.heard_at = clock.now()
                received = wire.decode(socket.recv_multipart())
                if isinstance(received.message, wire.Refused) and received.message.reason.startswith(wire.DENIED):
                    raise self._denied(received.message.reason.removeprefix(wire.DENIED))
                yield received

    def _denied(self, why: str) -> AccessDenied:
        return AccessDenied(f"the broker at {self.address} does not let this {self.role} in: {why}")

    def request(self, message: wire.Message, timeout_s: float | None) -> wire.Received:
        """Send and wait for the answer; None waits as long as the broker lives. Raises BrokerUnreachable."""
        return self._await(self.send(message), timeout_s)

    def _await(self, sequence: int, timeout_s: float | None) -> wire.Received:
        self.heard_at = clock.now()
        deadline = None if timeout_s is None else clock.now() + timeout_s
        next_beat = clock.now() + HEARTBEAT_S
        while deadline is None or clock.now() < deadline:
            for received in self.receive(timeout_ms=200):
                if received.sequence == sequence:
                    return received
                if self.session and self.is_disowned(received):
                    raise BrokerUnreachable(f"the broker at {self.address} does not know this {self.role} any more")
            if self.session and clock.now() >= next_beat:
                next_beat = clock.now() + HEARTBEAT_S
                self.send_control(wire.Heartbeat())
            self.check_alive()
        raise BrokerUnreachable(f"the broker at {self.address} does not answer within {timeout_s:g} s; is it running?")

    def check_alive(self) -> None:
        """Raise BrokerUnreachable if the broker, which answers every heartbeat, is silent for too long, or closed."""
        for handshake in self._handshakes:
            if problem := handshake.problem():
                raise self._denied(problem)
        if clock.now() - self.heard_at > BROKER_SILENCE_S:
            raise BrokerUnreachable(
                f"the broker at {self.address} is silent for {BROKER_SILENCE_S:g} s; is it running?"
            )

    def close(self) -> None:
        for handshake in self._handshakes:
            handshake.close()
        self._data.close()
        self._control.close()
        self._context.term()
