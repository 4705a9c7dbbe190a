"""What every socket needs: multipart messages with little Python per frame, the broker's address, and the address of
this machine on the route to another host.

pyzmq's `send_multipart` and `recv_multipart` do enum arithmetic and read a socket option for every frame, which takes
longer than everything else for a small message.
"""

import fcntl
import socket
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import zmq
from zmq.backend import Socket as Backend

EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received without waiting."""
    return bool(int(Backend.get(socket, EVENTS)) & READABLE)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The frames of the next message, without copying. Raises zmq.Again if there is none."""
    frame = Backend.recv(socket, NOBLOCK, False, False)
    frames = [frame]
    while frame.more:
        frame = Backend.recv(socket, NOBLOCK, False, False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket[bytes], frames: Iterable[bytes | memoryview], wait: bool = False) -> None:
    """Send a message. Raises zmq.Again, with nothing sent, if the send queue is full: at once, or with `wait` after the
    socket's SNDTIMEO."""
    *first, last = frames
    flags = 0 if wait else NOBLOCK
    for frame in first:
        Backend.send(socket, frame, flags | SNDMORE, True, False)
    Backend.send(socket, last, flags, True, False)


# --- addresses --------------------------------------------------------------------------------------------------------


ADDRESS_FILE = "address"
"""File of the run folder with the broker's address."""
POLL_S = 0.05


def address_at(connect: str, patience_s: float) -> str:
    """Resolve the broker's address. `connect`: an address such as tcp://HOST:PORT, or a run folder. Raises TimeoutError
    if no broker has written its address there within `patience_s`."""
    if "://" in connect:
        return connect
    file = Path(connect) / ADDRESS_FILE
    deadline = time.monotonic() + patience_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no broker has written {file} within 'broker.patience_s' = {patience_s:g} s; start it")
        time.sleep(POLL_S)
    return file.read_text()


SIOCGIFADDR = 0x8915
INTERFACE_NAME_BYTES = 16
"""Length in bytes of an interface name in the kernel's interface request."""


def own_address(host: str, port: int) -> str:
    """This machine's address on the route to `host`, found without sending anything. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_towards(host: str, port: int) -> str:
    """Name of the network interface with this address; "" if it cannot be found (systems other than Linux). Raises
    OSError."""
    if sys.platform != "linux":
        return ""
    address = own_address(host, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[: INTERFACE_NAME_BYTES - 1]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""
