"""The addresses and ports of a process's listening TCP sockets (Linux)."""

import contextlib
import ipaddress
import os
from pathlib import Path

LISTENING = "0A"


def listeners(pid: int | str = "self") -> set[str]:
    """IP addresses on which the process has at least one listening socket."""
    return {host for host, _ in listening(pid)}


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """(IP address, port) of each listening socket of the process."""
    folder = Path("/proc") / str(pid)
    sockets, addresses = set(), set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                host, _, port = local.partition(":")
                addresses.add((address(host), int(port, 16)))
    return addresses


def address(words: str) -> str:
    """IP address in an entry of /proc/net, whose hexadecimal words of four bytes have the lowest byte first."""
    network_order = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(ipaddress.ip_address(network_order))
