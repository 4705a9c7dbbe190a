"""An agents process's end of the conversation with the broker, in a thread of its own.

What agents say is kept until it is on the broker's disk, whatever connections do meanwhile. What is heard goes to the
event loop that the gateway lives in.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np

from april import wire
from april.connections.broker import BrokerConnection, BrokerUnreachable
from april.wire.rows import Row, padded, read_rows
from april.workers.reports import Reports

log = logging.getLogger(__name__)

POLL_MS = 50
Said = tuple[Row, bytes]
"""a row and its payload"""


class Listener(Protocol):
    """Called in the event loop."""

    def open(self, told: wire.Session, said: list[Said]) -> None:
        """A session is this process's, again perhaps; all that is on disk of it."""

    def hear(self, said: list[Said]) -> None:
        """New tokens of the policy, which are on disk."""

    def lose(self, lease_id: int, why: str) -> None:
        """A session is not this process's any more."""

    def found(self, holder: wire.Holder) -> None:
        """Who has a session that was asked for."""

    def stop(self, why: str) -> None:
        """No session will come any more."""


class Link(threading.Thread):
    def __init__(self, connection: BrokerConnection, room: int, address: str, listener: Listener):
        """`room`: sessions that are taken at once; `address`: of the API, for other agents processes. Start it within
        the event loop that `listener` lives in."""
        super().__init__(name="link", daemon=True)
        self.connection = connection
        self.room = wire.Room(room, address)
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self.reports = Reports(connection)
        self.leases: set[int] = set()
        self.questions: set[wire.Whose] = set()
        """that are not answered yet"""
        self.stopping = ""
        self.failure: Exception | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        connection.wake_by(self._wake)

    # --- from the event loop ----------------------------------------------------------------------------------

    def say(self, lease_id: int, start: int, tokens: np.ndarray, request: wire.TurnRequest, parent: int) -> None:
        """Open a turn with int32 [T] in a branch of so many tokens, which has left or now leaves its `parent`."""
        state = msgspec.msgpack.encode(request)
        self._order(lambda: self.reports.add_observation(lease_id, start, tokens, state, parent=parent))

    def close_session(self, closing: wire.Closing) -> None:
        self._order(lambda: self._close(closing))

    def ask(self, question: wire.Whose) -> None:
        """Who has a session."""
        self._order(lambda: self._ask(question))

    def leave(self, why: str) -> None:
        """What is open goes on elsewhere."""
        self._order(lambda: self._end(why))

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    # --- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._say_hello()
            while not self.stopping:
                self._turn()
            self.reports.send(all_of_it=True)
            self.connection.goodbye()
        except BrokerUnreachable as error:
            self.failure = error
            self._end(str(error))
        except Exception as error:
            log.exception("the conversation with the broker has failed")
            self.failure = error
            self._end("a fault of April's own")
        finally:
            self.connection.close()
            self._call(self.listener.stop, self.stopping)

    def _turn(self) -> None:
        for received in self.connection.receive(POLL_MS):
            self._handle(received)
        self.connection.check_alive()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._orders:
            self._orders.popleft()()
        self.reports.send()
        self.connection.hold(self.leases)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def _close(self, closing: wire.Closing) -> None:
        if closing.lease_id in self.leases:
            self.reports.close(closing)

    def _ask(self, question: wire.Whose) -> None:
        self.questions.add(question)
        self.connection.send(question)

    def _end(self, why: str) -> None:
        self.stopping = self.stopping or why

    def _say_hello(self) -> None:
        welcome = self.connection.hello(list(self.leases))
        for lease_id in welcome.lost:
            self._lose(lease_id, "the broker has given it to another")
        self.connection.send(self.room)
        for question in self.questions:
            self.connection.send(question)
        for lease_id in self.reports.unanswered():
            self.reports.send_again(lease_id)

    def _handle(self, received: wire.Received) -> None:
        message = received.message
        match message:
            case wire.Sessions():
                for place, told in enumerate(message.sessions):
                    if self.reports.is_closing(told.lease_id):
                        continue  # the broker has not read its end yet
                    self.leases.add(told.lease_id)
                    said = list(read(received.packed[2 * place].data, received.packed[2 * place + 1].data))
                    self._call(self.listener.open, told, said)
            case wire.Turns():
                self._call(self.listener.hear, list(read(*(packed.data for packed in received.packed))))
            case wire.Holder():
                self.questions.discard(wire.Whose(message.group, message.index, message.lease_id))
                self._call(self.listener.found, message)
            case wire.Answers():
                self._take_answers(message)
            case wire.Cancel(leases) | wire.Renewed(leases):
                for lease_id in leases:
                    self._lose(lease_id, "its lease is over")
            case wire.Stop():
                self._end(message.reason)
            case wire.Refused() if self.connection.is_disowned(received):
                self._say_hello()
            case wire.Refused() if "unknown session" not in message.reason:
                log.warning("refused: %s", message.reason)
                for lease_id in self.reports.unanswered():
                    self._lose(lease_id, message.reason)

    def _take_answers(self, answers: wire.Answers) -> None:
        for lease_id, length in answers.lengths:
            self.reports.acknowledge(lease_id, length)
        for lease_id, length in answers.resend:
            self.reports.send_again(lease_id, length)
        for lease_id in answers.done:
            self._forget(lease_id)
        for lease_id, reason in answers.refused:
            self._lose(lease_id, reason)

    def _lose(self, lease_id: int, why: str) -> None:
        """The session that the lease is of, or a branch of it."""
        lease_id = wire.session_of(lease_id)
        if self._forget(lease_id):
            self._call(self.listener.lose, lease_id, why)

    def _forget(self, lease_id: int) -> bool:
        """Whether there was such a session."""
        for branch in range(wire.BRANCHES):
            self.reports.forget(lease_id + branch)
        found = lease_id in self.leases
        self.leases.discard(lease_id)
        return found


def read(table: Any, payload: Any) -> Iterator[Said]:
    """The rows of a table, each with its own payload."""
    offset, view = 0, memoryview(payload)
    for row in read_rows(table):
        yield row, bytes(view[offset : offset + row.size])
        offset += padded(row.size)
