"""The broker's inbox: received messages in two priority lanes.

A ROUTER socket serves connections round-robin, so that a learner's three messages for a batch would wait behind three
reports of every worker. Therefore the inbox receives everything that has arrived, up to 64 MiB, before anything is
handled. Messages of all peers that hold no leases (learner, its machines, monitors), and of the control connections of
those that do, go first; reports follow in order of arrival. The messages of one connection stay in order.
"""

from collections import Counter, deque
from collections.abc import Mapping

import zmq

from april import wire
from april.broker.peers import HOLDERS, Peer
from april.wire import limits
from april.wire.sockets import base

INBOX_BYTES = 64 << 20
INBOX_MESSAGES = 2048
"""Most messages that the inbox holds, with at most INBOX_BYTES in all; further messages stay in their connections,
which slows their senders down."""
INBOX_FRAMES = 1 + limits.FROM_PEER.frames + 1
"""Most frames kept of a message, route included: one more than permitted, so that a message with too many is still
rejected."""
URGENT_IN_A_ROW = 8
"""Largest number of urgent messages that are handled in a row while a report waits, so that a peer that floods the
broker cannot starve the reports."""

Frames = list[zmq.Frame]
"""The frames of a message, its route first."""


class PriorityLane:
    """A queue of messages of one priority, in order of arrival."""

    def __init__(self) -> None:
        self.messages: deque[Frames] = deque()
        self.of_route: Counter[bytes] = Counter()
        """Number of waiting messages by route (the connection they came from)."""

    def add(self, message: Frames) -> None:
        self.messages.append(message)
        self.of_route[message[0].bytes] += 1

    def take(self) -> Frames:
        message = self.messages.popleft()
        route = message[0].bytes
        self.of_route[route] -= 1
        if not self.of_route[route]:
            del self.of_route[route]
        return message


class Inbox:
    """Receives all messages that have arrived at a socket, and returns them one by one, urgent messages before reports.

    message = inbox.next(peers.by_id)   # None if none is left
    """

    def __init__(self, socket: zmq.Socket):
        self.socket = socket
        self._urgent, self._reports = PriorityLane(), PriorityLane()
        self._bytes = 0
        self._urgent_in_a_row = 0

    @property
    def has_message(self) -> bool:
        return bool(self._urgent.messages or self._reports.messages) or base.has_message(self.socket)

    def next(self, peers: Mapping[int, Peer]) -> Frames | None:
        """The message to handle next; None if none is left. `peers`: by session id."""
        while self._has_room and base.has_message(self.socket):
            self._take_in(base.receive(self.socket), peers)
        if self._urgent.messages and (self._urgent_in_a_row < URGENT_IN_A_ROW or not self._reports.messages):
            lane, self._urgent_in_a_row = self._urgent, self._urgent_in_a_row + 1
        elif self._reports.messages:
            lane, self._urgent_in_a_row = self._reports, 0
        else:
            return None
        message = lane.take()
        self._bytes -= message_bytes(message)
        return message

    @property
    def _has_room(self) -> bool:
        return self._bytes < INBOX_BYTES and len(self._urgent.messages) + len(self._reports.messages) < INBOX_MESSAGES

    def _take_in(self, message: Frames, peers: Mapping[int, Peer]) -> None:
        del message[INBOX_FRAMES:]
        self._bytes += message_bytes(message)
        is_urgent = self._is_urgent(message, peers)
        (self._urgent if is_urgent else self._reports).add(message)

    def _is_urgent(self, message: Frames, peers: Mapping[int, Peer]) -> bool:
        """Whether a message goes to the urgent lane; it follows earlier messages of its connection into their lane
        while they wait. `peers`: by session id."""
        route = message[0].bytes
        if route in self._reports.of_route or route in self._urgent.of_route:
            return route in self._urgent.of_route
        peer = peers.get(wire.read_session_id(message[1:]))
        if peer is None:
            return False
        return route == peer.control_route or (route == peer.data_route and peer.role not in HOLDERS)


def message_bytes(message: Frames) -> int:
    return sum(map(len, message))
