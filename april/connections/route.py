"""Which of this machine's addresses and interfaces lead to another one."""

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915
INTERFACE = 16
"""bytes of an interface's name in the kernel's request"""


def own_address(host: str, port: int) -> str:
    """Which of this machine's addresses it speaks from to `host`; nothing is sent. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def interface_towards(host: str, port: int) -> str:
    """The interface that has that address; empty where the system does not say (other than Linux). Raises OSError."""
    if sys.platform != "linux":
        return ""
    wanted = own_address(host, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[: INTERFACE - 1]))
            except OSError:  # one without an address
                continue
            if socket.inet_ntoa(told[20:24]) == wanted:
                return name
    return ""
