"""Frames on the pipes between a pool and its processes: a 4-byte little-endian length, then MessagePack."""

import os
import sys
from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4
"""Size of the length prefix."""
READY = bytes(LENGTH_BYTES)
"""An empty frame: the process is ready."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def private_pipes() -> tuple[int, BinaryIO]:
    """Move stdin and stdout out of reach of user code; returns (descriptor to read from, stream to write to).

    What user code prints then goes to stderr, and its stdin is empty.
    """
    incoming, outgoing = os.dup(0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return incoming, outgoing


def send(outgoing: BinaryIO, data: bytes) -> None:
    outgoing.write(data)
    outgoing.flush()
