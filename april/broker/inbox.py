"""What has come to the broker and waits to be handled: what is short and waited for goes first.

A ROUTER gives one message of each connection in turn, so that a learner's three messages for a batch would wait behind
three reports of every worker. Here all that has come is taken in before anything is handled, 64 MiB at the most. What a
learner, a monitor or an operator says is handled next, and what a worker says on its control connection. Reports follow
in the order in which they came. The messages of one connection stay in order.
"""

from collections import deque
from collections.abc import Mapping

import zmq

from april import wire
from april.broker.sessions import HOLDERS, Session
from april.connections import sockets

HELD_BYTES = 64 << 20
HELD_MESSAGES = 2048
"""with so many, or so many bytes, no more is taken in: what comes then waits in its connection and holds its peer up"""
IN_A_ROW = 8
"""so many go before a report, then one report does: nobody who asks without end keeps the reports waiting"""

Arrived = list[zmq.Frame]
"""a message, its route first"""


class Inbox:
    """inbox.next(sessions.by_id)   # or None"""

    def __init__(self, socket: zmq.Socket):
        self.socket = socket
        self._first: deque[Arrived] = deque()
        self._rest: deque[Arrived] = deque()
        self._behind: dict[bytes, int] = {}
        """by route, how many messages of it are in the rest"""
        self._bytes = 0
        self._in_a_row = 0

    @property
    def has_message(self) -> bool:
        return bool(self._first or self._rest) or sockets.has_message(self.socket)

    def next(self, sessions: Mapping[int, Session]) -> Arrived | None:
        """The message to handle now; None if nothing is left. `sessions`: by number."""
        while self._has_room and sockets.has_message(self.socket):
            self._take_in(sockets.receive(self.socket), sessions)
        if self._first and (self._in_a_row < IN_A_ROW or not self._rest):
            message = self._first.popleft()
            self._in_a_row += 1
        elif self._rest:
            message = self._rest.popleft()
            self._count(message, -1)
            self._in_a_row = 0
        else:
            return None
        self._bytes -= size(message)
        return message

    @property
    def _has_room(self) -> bool:
        return self._bytes < HELD_BYTES and len(self._first) + len(self._rest) < HELD_MESSAGES

    def _take_in(self, message: Arrived, sessions: Mapping[int, Session]) -> None:
        self._bytes += size(message)
        if self._goes_first(message, sessions.get(wire.session_in(message[1:]))):
            self._first.append(message)
        else:
            self._rest.append(message)
            self._count(message, 1)

    def _goes_first(self, message: Arrived, session: Session | None) -> bool:
        route = message[0].bytes
        if session is None or route in self._behind:
            return False
        return route == session.control_route or (route == session.data_route and session.role not in HOLDERS)

    def _count(self, message: Arrived, more: int) -> None:
        route = message[0].bytes
        self._behind[route] = self._behind.get(route, 0) + more
        if not self._behind[route]:
            del self._behind[route]


def size(message: Arrived) -> int:
    return sum(map(len, message))
