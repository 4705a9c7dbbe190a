"""Multipart messages through a socket, with as little Python for each frame as possible.

pyzmq's `send_multipart` and `recv_multipart` do arithmetic with enums and ask for an option at every frame, which
takes longer than the rest of a small message.
"""

from collections.abc import Iterable

import zmq
from zmq.backend import Socket as Backend

EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)


def has_message(socket: zmq.Socket) -> bool:
    """Whether `receive` would find one now."""
    return bool(int(Backend.get(socket, EVENTS)) & READABLE)


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """The frames of the next message, not copied. Raises zmq.Again if there is none."""
    frame = Backend.recv(socket, NOBLOCK, False, False)
    frames = [frame]
    while frame.more:
        frame = Backend.recv(socket, NOBLOCK, False, False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket, frames: Iterable[bytes | memoryview], wait: bool = False) -> None:
    """Raises zmq.Again, with nothing sent, if the peer does not read: at once, or after the socket's SNDTIMEO."""
    *first, last = frames
    flags = 0 if wait else NOBLOCK
    for frame in first:
        Backend.send(socket, frame, flags | SNDMORE, True, False)
    Backend.send(socket, last, flags, True, False)
