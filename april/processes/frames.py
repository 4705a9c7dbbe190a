"""How a pool and its processes talk over pipes: MessagePack behind a 4-byte little-endian length."""

import os
import sys
from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4
READY = bytes(LENGTH_BYTES)
"""an empty frame: the process is up"""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def private_pipes() -> tuple[int, BinaryIO]:
    """(what comes from the pool, what goes to it), out of reach of foreign code that prints or reads: what it prints
    goes where its errors go."""
    incoming, outgoing = os.dup(0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return incoming, outgoing


def send(outgoing: BinaryIO, data: bytes) -> None:
    outgoing.write(data)
    outgoing.flush()
