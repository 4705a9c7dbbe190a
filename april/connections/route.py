"""This machine's address and network interface on the route to another host."""

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915
INTERFACE = 16
"""Bytes of an interface name in the kernel's request."""


def own_address(host: str, port: int) -> str:
    """The local address that connections to `host` use. Sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def interface_towards(host: str, port: int) -> str:
    """Name of the interface with that address; "" if it cannot be found (other systems than Linux). Raises OSError."""
    if sys.platform != "linux":
        return ""
    address = own_address(host, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[: INTERFACE - 1]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""
