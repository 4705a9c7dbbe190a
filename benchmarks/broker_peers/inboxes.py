"""Hundreds of sockets of one process, waited for at the cost of those that have something.

`zmq.Poller` asks the kernel for each socket each time: with 500 of them that is most of what a process of the load
does.
"""

import select
from collections.abc import Iterator

import zmq

from april.wire.sockets import base


class Inboxes:
    """inboxes.add(socket); after each send `inboxes.look_at(socket)`; `for socket, frames in inboxes.receive(2)`"""

    def __init__(self):
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, zmq.Socket] = {}
        self._unseen: set[zmq.Socket] = set()
        """may have something that their descriptors do not tell again: those tell of a change, and sending takes note
        of it as well"""

    def add(self, socket: zmq.Socket) -> None:
        descriptor = socket.getsockopt(zmq.FD)
        self._by_descriptor[descriptor] = socket
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._unseen.add(socket)

    def look_at(self, socket: zmq.Socket) -> None:
        self._unseen.add(socket)

    def receive(self, timeout_ms: float) -> Iterator[tuple[zmq.Socket, list[zmq.Frame]]]:
        """All that has come, once there is something or the time has passed."""
        told = self._epoll.poll(0.0 if self._unseen else timeout_ms / 1000)
        unseen, self._unseen = self._unseen, set()
        for socket in unseen.union(self._by_descriptor[descriptor] for descriptor, _ in told):
            while base.has_message(socket):
                yield socket, base.receive(socket)

    def close(self) -> None:
        self._epoll.close()
