"""Common to all sockets: multipart messages with little Python per frame, the broker's address, and the address of this
machine on the route to another host.

pyzmq's `send_multipart` and `recv_multipart` do enum arithmetic and read a socket option for every frame, which takes
longer than everything else for a small message.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import struct
import sys
import tempfile
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
    """Send a message. If the socket's send queue is full, zmq.Again is raised and nothing is sent: at once or, with
    `wait`, after the socket's SNDTIMEO."""
    *first, last = frames
    flags = 0 if wait else NOBLOCK
    for frame in first:
        Backend.send(socket, frame, flags | SNDMORE, True, False)
    Backend.send(socket, last, flags, True, False)


# --- addresses --------------------------------------------------------------------------------------------------------


ADDRESS_FILE = "address"
"""Name of the file in the run folder to which the broker writes its address."""
POLL_S = 0.05


def address_at(connect: str, patience_s: float) -> str:
    """Resolve the broker's address. `connect`: an address (tcp://HOST:PORT, ipc://PATH), or a run folder. Raises
    TimeoutError if no broker has written its address there within `patience_s`."""
    if "://" in connect:
        return connect
    file = Path(connect) / ADDRESS_FILE
    deadline = time.monotonic() + patience_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no broker has written {file} within 'broker.patience_s' = {patience_s:g} s; start it")
        time.sleep(POLL_S)
    return file.read_text()


UNIX = "ipc://"
"""Beginning of the address of a Unix socket, before its path."""
LONGEST_FOLDER = 60
"""Maximum length (bytes) of a path of a folder for temporary files that leaves room for the name of a socket; the
kernel takes 107 in all."""


def socket_address(last: str = "") -> str:
    """Address of a Unix socket in a folder of mode 0700. `last`: address of the run's earlier broker, to which peers
    still connect; it is taken again if its folder exists or can be made, and belongs to this user alone. Raises
    OSError."""
    folder = Path(last.removeprefix(UNIX)).parent
    if last.startswith(UNIX):
        with contextlib.suppress(OSError):
            folder.mkdir(0o700)
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return last
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="april-", dir=base if len(os.fsencode(base)) <= LONGEST_FOLDER else "/tmp"))
    return f"{UNIX}{folder}/broker"


def is_socket_file(address: str) -> bool:
    """Whether an address is that of a Unix socket, which only processes of this machine reach."""
    return address.startswith(UNIX)


def socket_beside(address: str, name: str) -> str:
    """Address for another Unix socket, whose file name begins with `name`, in the folder of the broker's socket
    (`address`); no earlier process has used it."""
    return f"{address.rpartition('/')[0]}/{name}-{secrets.token_hex(4)}"


def remove_socket_folder(address: str) -> None:
    """Remove the folder of a Unix socket, once no process uses it any more; does nothing for another address."""
    if is_socket_file(address):
        shutil.rmtree(Path(address.removeprefix(UNIX)).parent, ignore_errors=True)


def route_to(address: str) -> tuple[str, int]:
    """Host and port of the broker's address, for `own_address`; for a Unix socket a host and port of this machine's
    loopback."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return ("127.0.0.1", 1) if is_socket_file(address) else (host, int(port))


SIOCGIFADDR = 0x8915
INTERFACE_NAME_BYTES = 16
"""Number of bytes that Linux reserves for an interface's name in a request about it (`ifreq`)."""


def own_address(host: str, port: int) -> str:
    """This machine's IPv4 address on the route to `host`, found by connecting a UDP socket to `host` and `port`, which
    sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_towards(host: str, port: int) -> str:
    """Name of the network interface with this machine's address on the route to `host` (`own_address`); "" if it cannot
    be found, as on systems other than Linux. Raises OSError."""
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
