"""A peer's control connection, in a thread of its own: signs of life go out whatever its main loop does, and orders in.

The thread says every second that the process lives, which leases it still works on, and where its main loop is. So a
long decode step costs no leases, and others see what the loop is at.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from april import wire
from april.connections import sockets
from april.processes import clock
from april.processes.pulse import MAIN

HEARTBEAT_S = 1.0
JOIN_S = 5.0
"""longest wait for the thread to end; it waits for nothing itself"""


class Control(threading.Thread):
    """The socket is its own, from `start` until `end` is over.

    control.begin(session, renew_s=15)
    control.leases, control.emitted_tokens = [3, 4], 1200       # whenever they change
    for received in control.take(): ...                         # once `arrived` can be read
    """

    def __init__(self, socket: zmq.Socket):
        super().__init__(name="control", daemon=True)
        self.socket = socket
        self.arrived = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """can be read when something has"""
        self.heard_at = clock.now()
        """when anything of the broker was heard last, by either connection"""
        self.session = 0
        """0: nothing is said"""
        self.leases: Sequence[int] = ()
        self.emitted_tokens = self.received_bytes = 0
        self.slots: wire.Slots | None = None
        """as in `wire.Heartbeat`"""
        self._renew_s = 0.0
        self._next_beat = self._next_renewal = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: deque[list] = deque()
        self._inbox: deque[wire.Received | Exception] = deque()
        self._ended = False

    # --- from the thread that owns the data connection --------------------------------------------------------

    def begin(self, session: int, renew_s: float) -> None:
        """Bind the connection to a session, and say from now on that its peer lives."""
        self._renew_s, self._next_beat, self._next_renewal = renew_s, 0.0, clock.now() + renew_s
        self.send(wire.encode(wire.Bind(), (), session))
        self.session = session

    def send(self, frames: list) -> None:
        self._outbox.append(frames)
        os.eventfd_write(self._wake, 1)

    def take(self) -> Iterator[wire.Received]:
        """What has arrived. Raises what is wrong with it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.arrived)
        while self._inbox:
            received = self._inbox.popleft()
            if isinstance(received, Exception):
                raise received
            yield received

    def end(self) -> None:
        """Send what waits, then leave the socket to the caller."""
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
                self._say(self.session)
            self._say(0)
        except Exception as error:
            self._hand_on(error)

    def _receive(self) -> None:
        while sockets.has_message(self.socket):
            self.heard_at = clock.now()
            frames = sockets.receive(self.socket)
            try:
                self._hand_on(wire.decode(frames))
            except wire.WireError as error:
                self._hand_on(error)

    def _hand_on(self, received: wire.Received | Exception) -> None:
        self._inbox.append(received)
        os.eventfd_write(self.arrived, 1)

    def _say(self, session: int) -> None:
        """What the owner has to say, then a sign of life in a session that was bound before that."""
        with contextlib.suppress(zmq.Again):  # the broker is away; what waits goes out in the next pass
            while self._outbox:
                sockets.send(self.socket, self._outbox[0])
                self._outbox.popleft()
            now = clock.now()
            if now < self._next_beat:
                return
            self._next_beat = now + HEARTBEAT_S
            if session:
                sockets.send(self.socket, wire.encode(self._heartbeat(now), (), session))

    def _heartbeat(self, now: float) -> wire.Heartbeat:
        leases = list(self.leases) if now >= self._next_renewal else []
        if leases:
            self._next_renewal = now + self._renew_s
        return wire.Heartbeat(leases, self.emitted_tokens, self.received_bytes, *MAIN.look(), self.slots)
