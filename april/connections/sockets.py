"""Sends and receives multipart messages with little Python per frame.

pyzmq's `send_multipart` and `recv_multipart` do enum arithmetic and read a socket option for every frame, which takes
longer than everything else for a small message.
"""

from collections.abc import Iterable

import zmq
from zmq.backend import Socket as Backend

EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)


def has_message(socket: zmq.Socket) -> bool:
    """Whether a message can be received without waiting."""
    return bool(int(Backend.get(socket, EVENTS)) & READABLE)


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """The frames of the next message, without copying. Raises zmq.Again if there is none."""
    frame = Backend.recv(socket, NOBLOCK, False, False)
    frames = [frame]
    while frame.more:
        frame = Backend.recv(socket, NOBLOCK, False, False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket, frames: Iterable[bytes | memoryview], wait: bool = False) -> None:
    """Send a message. Raises zmq.Again, with nothing sent, if the send queue is full: at once, or with `wait` after the
    socket's SNDTIMEO."""
    *first, last = frames
    flags = 0 if wait else NOBLOCK
    for frame in first:
        Backend.send(socket, frame, flags | SNDMORE, True, False)
    Backend.send(socket, last, flags, True, False)
