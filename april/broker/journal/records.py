"""How one journalled fact lies on disk: the event, then the arrays that came with it.

A record is the MessagePack array `[synced, crc32, event, crc32, array, ...]` in fixed-width form, so that any
MessagePack reader can stream the file. `synced` is the position up to which the journal was on disk when the
record was written; the event's checksum covers it. Whatever lies below the `synced` of a good record cannot be
what a crash left half written.
"""

import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from zlib_ng.zlib_ng import crc32

from april.broker.ledger.events import Part

HEAD = struct.Struct(">BBQBIBI")
"""array, uint64 synced, uint32 crc32, bin32 length of the event: 20 bytes"""
PART = struct.Struct(">BIBI")
"""uint32 crc32, bin32 length of an array: 10 bytes"""
ARRAY, UINT64, UINT32, BIN32 = 0x90, 0xCF, 0xCE, 0xC6
MAX_PARTS = 6
FORM = re.compile(rb"(?=[\x93\x95\x97\x99\x9b\x9d\x9f]\xcf.{8}\xce.{4}\xc6)", re.DOTALL)
"""what every record begins with, and little else does"""


class Record(msgspec.Struct, frozen=True, gc=False):
    synced: int
    event: bytes | memoryview
    arrays: list[Part]
    length: int
    """bytes of the whole record"""


class Head(NamedTuple):
    synced: int
    checksum: int
    """of the event"""
    size: int
    """of the event, bytes"""


def encode(synced: int, event: bytes, arrays: Sequence[Part] = ()) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a record, in order, and its length; the arrays are not copied."""
    elements = ARRAY | (3 + 2 * len(arrays))
    head = HEAD.pack(elements, UINT64, synced, UINT32, event_checksum(synced, event), BIN32, len(event))
    pieces: list[bytes | memoryview] = [head + event]
    length = HEAD.size + len(event)
    for checksum, data in arrays:
        size = len(data)
        pieces += (PART.pack(UINT32, checksum, BIN32, size), data)
        length += PART.size + size
    return pieces, length


def decode(data: bytes | memoryview, offset: int = 0) -> Record | None:
    """The record that begins at `offset`; None if it is not whole or a checksum does not agree."""
    view = memoryview(data)
    if len(view) - offset < HEAD.size:
        return None
    elements, uint64, synced, uint32, checksum, bin32, length = HEAD.unpack_from(view, offset)
    count, odd = divmod(elements - (ARRAY | 3), 2)
    if (uint64, uint32, bin32) != (UINT64, UINT32, BIN32) or odd or not 0 <= count <= MAX_PARTS:
        return None
    at = offset + HEAD.size + length
    event = view[offset + HEAD.size : at]
    if len(event) != length or event_checksum(synced, event) != checksum:
        return None
    arrays: list[Part] = []
    for _ in range(count):
        if len(view) - at < PART.size:
            return None
        uint32, checksum, bin32, length = PART.unpack_from(view, at)
        array = view[at + PART.size : at + PART.size + length]
        at += PART.size + length
        if (uint32, bin32, len(array)) != (UINT32, BIN32, length) or crc32(array) != checksum:
            return None
        arrays.append((checksum, array))
    return Record(synced, event, arrays, at - offset)


def decode_head(data: bytes) -> Head | None:
    """What a record begins with; None of bytes that are too few."""
    if len(data) != HEAD.size:
        return None
    _, _, synced, _, checksum, _, size = HEAD.unpack(data)
    return Head(synced, checksum, size)


def event_checksum(synced: int, event: bytes | memoryview) -> int:
    return crc32(event, _checksum_of_position(synced))


@lru_cache(maxsize=64)
def _checksum_of_position(synced: int) -> int:
    return crc32(synced.to_bytes(8))
