"""The connection of an agents process to the broker, in its own thread.

Observations are kept until the broker acknowledges them, also across reconnects. Messages from the broker are handed to
the event loop of the gateway.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from april import wire
from april.wire.rows import ReportRow, padded, read_rows
from april.wire.sessions import image_parts
from april.wire.sockets.broker import BrokerConnection, BrokerUnreachable
from april.workers.reports import Reports

log = logging.getLogger(__name__)

POLL_MS = 50
RowWithPayload = tuple[ReportRow, bytes]
"""A row of a report (what it adds to which sample) and its payload: the token ids as bytes and, for an observation, the
request."""


class Listener(Protocol):
    """Receives the broker's messages; its methods are called in the gateway's event loop."""

    def open_session(self, session: wire.AgentSession, rows: list[RowWithPayload]) -> None:
        """Handle that this process now holds the session; may be repeated after a reconnect.

        `rows`: all rows of the session in the journal.
        """

    def receive_rows(self, rows: list[RowWithPayload]) -> None:
        """Handle new tokens of the policy, which the broker has journaled."""

    def drop(self, lease_id: int, why: str) -> None:
        """Handle that this process no longer holds the session, for the reason `why`."""

    def receive_holder(self, holder: wire.Holder) -> None:
        """Handle the broker's answer to `BrokerLink.find_holder`."""

    def stop(self, why: str) -> None:
        """Handle the end of the link, for the reason `why`: no more sessions will come."""


class BrokerLink(threading.Thread):
    def __init__(self, connection: BrokerConnection, capacity: int, address: str, listener: Listener):
        """`capacity`: most sessions held at once; `address`: base URL of the API for other agents processes. Construct
        it in the event loop of `listener`."""
        super().__init__(name="link", daemon=True)
        self.connection = connection
        self.capacity = wire.HolderCapacity(capacity, address)
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self.reports = Reports(connection)
        self.leases: set[int] = set()
        self.questions: set[wire.HolderRequest] = set()
        """Questions about sessions' holders that the broker has not answered yet."""
        self.images: dict[str, tuple[bytes, list[asyncio.Future[str]]]] = {}
        """(PNG file, futures that wait for the broker's answer) of each image not stored by the broker yet, by name."""
        self.stopping = ""
        """Why the link to the broker is ending; "" while the link is in use."""
        self.failure: Exception | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        connection.wake_by(self._wake)

    # --- from the event loop ----------------------------------------------------------------------------------

    def send_observation(
        self, lease_id: int, start: int, tokens: np.ndarray, request: wire.TurnRequest, parent: int
    ) -> None:
        """Open a turn: append the observation `tokens`, int32 [T], to a fork (a branch of the session's conversation)
        at its token `start`. `lease_id`: that of the fork; `parent`: number of the fork from which it branches off;
        `request`: how to sample the turn."""
        state = msgspec.msgpack.encode(request)
        self._enqueue(lambda: self.reports.add_observation(lease_id, start, tokens, state, parent=parent))

    def close_session(self, closing: wire.Closing) -> None:
        self._enqueue(lambda: self._close(closing))

    async def keep_image(self, name: str, png: bytes) -> str:
        """Upload an image, the prepared file `png` whose sha256 is `name`, to the broker; returns "" once it is on the
        broker's disk, or why the broker does not keep it."""
        answer = self.loop.create_future()
        self._enqueue(lambda: self._keep_image(name, png, answer))
        return await answer

    def find_holder(self, question: wire.HolderRequest) -> None:
        """Ask the broker which process holds a session; `Listener.receive_holder` gets the answer."""
        self._enqueue(lambda: self._find_holder(question))

    def leave(self, why: str) -> None:
        """End the link to the broker, for the reason `why`; other agents processes continue the open sessions."""
        self._enqueue(lambda: self._end(why))

    def _enqueue(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    # --- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._say_hello()
            while not self.stopping:
                self._run_once()
            self.reports.send(force=True)
            self.connection.goodbye()
        except BrokerUnreachable as error:
            self.failure = error
            self._end(str(error))
        except Exception as error:
            log.exception("the conversation with the broker has failed")
            self.failure = error
            self._end("a fault of April's own")
        finally:
            try:
                self.connection.close()
            finally:
                self._answer_images(self.stopping)
                self._notify(self.listener.stop, self.stopping)

    def _run_once(self) -> None:
        for received in self.connection.receive(POLL_MS):
            self._handle(received)
        self.connection.check_alive()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._commands:
            self._commands.popleft()()
        self.reports.send()
        self.connection.hold(self.leases)

    def _notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def _close(self, closing: wire.Closing) -> None:
        if closing.lease_id in self.leases:
            self.reports.close(closing)

    def _find_holder(self, question: wire.HolderRequest) -> None:
        self.questions.add(question)
        self.connection.send(question)

    def _keep_image(self, name: str, png: bytes, answer: "asyncio.Future[str]") -> None:
        _, waiting = self.images.setdefault(name, (png, []))
        waiting.append(answer)
        if len(waiting) == 1:
            self._send_image(name)

    def _send_image(self, name: str) -> None:
        png, _ = self.images[name]
        for part, arrays in image_parts(name, png):
            self.connection.send(part, arrays)

    def _answer_images(self, fault: str, names: Sequence[str] | None = None) -> None:
        """Answer all that wait for the images `names` (None: all images) with `fault`: why the broker does not keep
        these images, "" if it does."""
        for name in list(self.images) if names is None else names:
            _, waiting = self.images.pop(name, (b"", []))
            for answer in waiting:
                self._notify(set_answer, answer, fault)

    def _end(self, why: str) -> None:
        self.stopping = self.stopping or why

    def _say_hello(self) -> None:
        welcome = self.connection.hello(list(self.leases))
        for lease_id in welcome.lost_lease_ids:
            self._drop(lease_id, "the broker has given it to another")
        self.connection.send(self.capacity)
        for question in self.questions:
            self.connection.send(question)
        for name in self.images:
            self._send_image(name)
        for lease_id in self.reports.unanswered():
            self.reports.send_again(lease_id)

    def _handle(self, received: wire.Received) -> None:
        message = received.message
        match message:
            case wire.AgentSessionList():
                for index, session in enumerate(message.sessions):
                    self.leases.add(session.lease_id)
                    table, payload = received.packed[2 * index : 2 * index + 2]
                    rows = list(rows_with_payloads(table.data, payload.data))
                    self._notify(self.listener.open_session, session, rows)
            case wire.SessionTurns():
                rows = list(rows_with_payloads(*(packed.data for packed in received.packed)))
                self._notify(self.listener.receive_rows, rows)
            case wire.Holder():
                self.questions.discard(wire.HolderRequest(message.group, message.index, message.lease_id))
                self._notify(self.listener.receive_holder, message)
            case wire.ImageKept(name, fault):
                self._answer_images(fault, [name])
            case wire.Answers():
                self._take_answers(message)
            case wire.Cancel(leases) | wire.Renewed(leases):
                for lease_id in leases:
                    self._drop(lease_id, "its lease is over")
            case wire.Stop():
                self._end(message.reason)
            case wire.Refused() if self.connection.is_disowned(received):
                self._say_hello()
            case wire.Refused() if "unknown session" not in message.reason:
                log.warning("refused: %s", message.reason)
                self._answer_images(message.reason)
                for lease_id in self.reports.unanswered():
                    self._drop(lease_id, message.reason)

    def _take_answers(self, answers: wire.Answers) -> None:
        for lease_id, length in answers.acks:
            self.reports.acknowledge(lease_id, length)
        for lease_id, length in answers.nacks:
            self.reports.send_again(lease_id, length)
        for lease_id in answers.done:
            self._forget(lease_id)
        for lease_id, reason in answers.rejects:
            self._drop(lease_id, reason)

    def _drop(self, lease_id: int, why: str) -> None:
        """Give up the session with this lease id, or with a fork of this lease id, and tell the listener `why`."""
        lease_id = wire.session_lease_id(lease_id)
        if self._forget(lease_id):
            self._notify(self.listener.drop, lease_id, why)

    def _forget(self, lease_id: int) -> bool:
        """Forget a session's lease and unacknowledged rows; returns whether this process held the lease."""
        for fork in range(wire.MAX_FORKS):
            self.reports.forget(lease_id + fork)
        found = lease_id in self.leases
        self.leases.discard(lease_id)
        return found


def set_answer(answer: "asyncio.Future[str]", fault: str) -> None:
    if not answer.done():
        answer.set_result(fault)


def rows_with_payloads(table: Any, payload: Any) -> Iterator[RowWithPayload]:
    """The rows of a packed `table`, each with its own part of `payload`, in which the payloads of all rows lie one
    after another."""
    offset, view = 0, memoryview(payload)
    for row in read_rows(table):
        yield row, bytes(view[offset : offset + row.size])
        offset += padded(row.size)
