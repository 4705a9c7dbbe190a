"""What has come to the broker and waits to be handled: what is short and waited for goes first.

A ROUTER gives one message of each connection in turn, so that a learner's three messages for a batch would wait behind
three reports of every worker. Here all that has come is taken in before anything is handled, 64 MiB at the most. What a
learner, a monitor or an operator says is handled next, and what a worker says on its control connection. Reports follow
in the order in which they came. The messages of one connection stay in order.
"""

from collections import Counter, deque
from collections.abc import Mapping

import zmq

from april import wire
from april.broker.sessions import HOLDERS, Session
from april.connections import sockets
from april.wire import limits

HELD_BYTES = 64 << 20
HELD_MESSAGES = 2048
"""with so many, or so many bytes, no more is taken in: what comes then waits in its connection and holds its peer up"""
HELD_FRAMES = 1 + limits.FROM_PEER.frames + 1
"""of a message, its route among them: with one more than a peer may send it is refused as it would be with all"""
IN_A_ROW = 8
"""so many go before a report, then one report does: nobody who asks without end keeps the reports waiting"""

Arrived = list[zmq.Frame]
"""a message, its route first"""


class Line:
    """Messages in the order in which they came."""

    def __init__(self) -> None:
        self.messages: deque[Arrived] = deque()
        self.of_route: Counter[bytes] = Counter()

    def add(self, message: Arrived) -> None:
        self.messages.append(message)
        self.of_route[message[0].bytes] += 1

    def take(self) -> Arrived:
        message = self.messages.popleft()
        route = message[0].bytes
        self.of_route[route] -= 1
        if not self.of_route[route]:
            del self.of_route[route]
        return message


class Inbox:
    """inbox.next(sessions.by_id)   # or None"""

    def __init__(self, socket: zmq.Socket):
        self.socket = socket
        self._first, self._rest = Line(), Line()
        self._bytes = 0
        self._in_a_row = 0

    @property
    def has_message(self) -> bool:
        return bool(self._first.messages or self._rest.messages) or sockets.has_message(self.socket)

    def next(self, sessions: Mapping[int, Session]) -> Arrived | None:
        """The message to handle now; None if nothing is left. `sessions`: by number."""
        while self._has_room and sockets.has_message(self.socket):
            self._take_in(sockets.receive(self.socket), sessions)
        if self._first.messages and (self._in_a_row < IN_A_ROW or not self._rest.messages):
            line, self._in_a_row = self._first, self._in_a_row + 1
        elif self._rest.messages:
            line, self._in_a_row = self._rest, 0
        else:
            return None
        message = line.take()
        self._bytes -= message_bytes(message)
        return message

    @property
    def _has_room(self) -> bool:
        return self._bytes < HELD_BYTES and len(self._first.messages) + len(self._rest.messages) < HELD_MESSAGES

    def _take_in(self, message: Arrived, sessions: Mapping[int, Session]) -> None:
        del message[HELD_FRAMES:]
        self._bytes += message_bytes(message)
        goes_first = self._goes_first(message, sessions)
        (self._first if goes_first else self._rest).add(message)

    def _goes_first(self, message: Arrived, sessions: Mapping[int, Session]) -> bool:
        """What comes behind others of its connection goes where they wait."""
        route = message[0].bytes
        if route in self._rest.of_route or route in self._first.of_route:
            return route in self._first.of_route
        session = sessions.get(wire.session_in(message[1:]))
        if session is None:
            return False
        return route == session.control_route or (route == session.data_route and session.role not in HOLDERS)


def message_bytes(message: Arrived) -> int:
    return sum(map(len, message))
