"""The addresses of a process's listening TCP sockets (Linux)."""

import contextlib
import ipaddress
import os
from pathlib import Path

LISTENING = "0A"


def listeners(pid: int | str = "self") -> set[str]:
    """IP addresses on which the process has at least one listening socket."""
    folder = Path("/proc") / str(pid)
    sockets, addresses = set(), set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                addresses.add(address(local.partition(":")[0]))
    return addresses


def address(words: str) -> str:
    """IP address in an entry of /proc/net, whose hexadecimal words of four bytes have the lowest byte first."""
    network_order = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(ipaddress.ip_address(network_order))
