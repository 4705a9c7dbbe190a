"""A peer's control connection, served by its own thread, so heartbeats do not depend on the main loop.

Every second the thread reports that the process is alive, which leases it holds and what its main loop is doing. So a
long decode step loses no leases, and the broker can show what the loop is doing. Commands arrive over the same socket.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from april import wire
from april.util import clock
from april.util.pulse import MAIN
from april.wire.sockets import base

HEARTBEAT_S = 1.0
JOIN_S = 5.0
"""Time limit of the wait for the control thread to end, seconds; the thread never blocks for long."""


class Control(threading.Thread):
    """Owns the control socket from `start` until `end` returns.

    control.begin(session, renew_s=15)
    control.lease_ids, control.emitted_tokens = [3, 4], 1200    # whenever they change
    for received in control.take(): ...                         # once `arrived` can be read
    """

    def __init__(self, socket: zmq.Socket[bytes]):
        super().__init__(name="control", daemon=True)
        self.socket = socket
        self.arrived = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Eventfd that is readable when messages have arrived."""
        self.heard_at = clock.now()
        """Time at which the broker's last message arrived on the control or the data connection, Unix time in
        seconds."""
        self.session = 0
        """Id of the session; 0: send no heartbeats."""
        self.lease_ids: Sequence[int] = ()
        self.emitted_tokens = self.received_bytes = 0
        self.slots: wire.Slots | None = None
        """Numbers of the worker's samples that generate or wait, for the next heartbeats; None: not reported."""
        self._renew_s = 0.0
        self._next_beat = self._next_renewal = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: deque[list[Any]] = deque()
        self._inbox: deque[wire.Received | Exception] = deque()
        self._ended = False

    # --- from the thread that owns the data connection --------------------------------------------------------

    def begin(self, session: int, renew_s: float) -> None:
        """Bind the connection to a session and start heartbeats. `renew_s`: interval of the heartbeats that list all
        leases, seconds."""
        self._renew_s, self._next_beat, self._next_renewal = renew_s, 0.0, clock.now() + renew_s
        self.send(wire.encode(wire.Bind(), (), session))
        self.session = session

    def send(self, frames: list[Any]) -> None:
        self._outbox.append(frames)
        os.eventfd_write(self._wake, 1)

    def take(self) -> Iterator[wire.Received]:
        """Take the messages that have arrived. Raises the error of a message that does not decode, and any error of the
        thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.arrived)
        while self._inbox:
            received = self._inbox.popleft()
            if isinstance(received, Exception):
                raise received
            yield received

    def end(self) -> None:
        """Send queued messages and end the thread; the caller may use the socket again."""
        self._ended = True
        os.eventfd_write(self._wake, 1)
        self.join(JOIN_S)
        os.close(self.arrived)
        os.close(self._wake)

    # --- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self.socket, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            while not self._ended:
                poller.poll(int(1000 * min(HEARTBEAT_S, max(0.0, self._next_beat - clock.now()))) + 1)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._receive()
                self._send_pending(self.session)
            self._send_pending(0)
        except Exception as error:
            self._hand_on(error)

    def _receive(self) -> None:
        while base.has_message(self.socket):
            self.heard_at = clock.now()
            frames = base.receive(self.socket)
            try:
                self._hand_on(wire.decode(frames))
            except wire.WireError as error:
                self._hand_on(error)

    def _hand_on(self, received: wire.Received | Exception) -> None:
        self._inbox.append(received)
        os.eventfd_write(self.arrived, 1)

    def _send_pending(self, session: int) -> None:
        """Send queued messages, then, every `HEARTBEAT_S`, a heartbeat in `session`, unless that is 0."""
        with contextlib.suppress(zmq.Again):  # the broker is away; what waits goes out in the next pass
            while self._outbox:
                base.send(self.socket, self._outbox[0])
                self._outbox.popleft()
            now = clock.now()
            if now < self._next_beat:
                return
            self._next_beat = now + HEARTBEAT_S
            if session:
                base.send(self.socket, wire.encode(self._heartbeat(now), (), session))

    def _heartbeat(self, now: float) -> wire.Heartbeat:
        lease_ids = list(self.lease_ids) if now >= self._next_renewal else []
        if lease_ids:
            self._next_renewal = now + self._renew_s
        return wire.Heartbeat(lease_ids, self.emitted_tokens, self.received_bytes, *MAIN.look(), self.slots)
