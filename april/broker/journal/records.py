"""The on-disk format of a journal record (one event and its arrays), and a cache of the newest records.

A record is the MessagePack array `[synced, crc32, event, crc32, array, ...]` in fixed-width form, so that any
MessagePack reader can stream the file. `synced` is the position up to which the journal was on disk when the
record was written; the event's checksum covers it. Bad bytes before the `synced` of a good record are therefore damage
and not a torn write of a crash.
"""

import re
import struct
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from zlib_ng.zlib_ng import crc32

from april.broker.ledger.events import Event, EventArray

HEAD = struct.Struct(">BBQBIBI")
"""Layout of a record's first 20 bytes: array header, uint64 `synced`, uint32 crc32, and the uint32 length of the
event."""
ARRAY_HEAD = struct.Struct(">BIBI")
"""Layout of the 10 bytes before each array: its uint32 crc32 and its uint32 length."""
ARRAY, UINT64, UINT32, BIN32 = 0x90, 0xCF, 0xCE, 0xC6
"""MessagePack type bytes of array, uint64, uint32 and bin32; the array's length (up to 15) is added to its type
byte."""
MAX_ARRAYS = 6
RECORD_START = re.compile(rb"(?=[\x93\x95\x97\x99\x9b\x9d\x9f]\xcf.{8}\xce.{4}\xc6)", re.DOTALL)
"""Regular expression that matches the start of every record, and rarely other bytes."""


class Record(msgspec.Struct, frozen=True, gc=False):
    synced: int
    event: bytes | memoryview
    arrays: list[EventArray]
    length: int
    """Length of the record, bytes."""


class RecordHead(NamedTuple):
    synced: int
    checksum: int
    """Crc32 of the event and of `synced`."""
    size: int
    """Length of the encoded event, bytes."""


def encode(synced: int, event: bytes, arrays: Sequence[EventArray] = ()) -> tuple[list[bytes | memoryview], int]:
    """Encode a record of an encoded event and its arrays, written while the journal is on disk up to `synced`; returns
    its pieces in order, which do not copy the arrays, and its length in bytes."""
    elements = ARRAY | (3 + 2 * len(arrays))
    head = HEAD.pack(elements, UINT64, synced, UINT32, event_checksum(synced, event), BIN32, len(event))
    pieces: list[bytes | memoryview] = [head + event]
    length = HEAD.size + len(event)
    for checksum, data in arrays:
        size = len(data)
        pieces += (ARRAY_HEAD.pack(UINT32, checksum, BIN32, size), data)
        length += ARRAY_HEAD.size + size
    return pieces, length


def decode(data: bytes | memoryview, offset: int = 0) -> Record | None:
    """Decode the record that begins at `offset`; None if it is incomplete or a checksum differs."""
    view = memoryview(data)
    if len(view) - offset < HEAD.size:
        return None
    elements, uint64, synced, uint32, checksum, bin32, length = HEAD.unpack_from(view, offset)
    count, odd = divmod(elements - (ARRAY | 3), 2)
    if (uint64, uint32, bin32) != (UINT64, UINT32, BIN32) or odd or not 0 <= count <= MAX_ARRAYS:
        return None
    end = offset + HEAD.size + length
    event = view[offset + HEAD.size : end]
    if len(event) != length or event_checksum(synced, event) != checksum:
        return None
    arrays: list[EventArray] = []
    for _ in range(count):
        if len(view) - end < ARRAY_HEAD.size:
            return None
        uint32, checksum, bin32, length = ARRAY_HEAD.unpack_from(view, end)
        array = view[end + ARRAY_HEAD.size : end + ARRAY_HEAD.size + length]
        end += ARRAY_HEAD.size + length
        if (uint32, bin32, len(array)) != (UINT32, BIN32, length) or crc32(array) != checksum:
            return None
        arrays.append((checksum, array))
    return Record(synced, event, arrays, end - offset)


def decode_head(data: bytes) -> RecordHead | None:
    """The head of a record; None if `data` is not `HEAD.size` bytes long."""
    if len(data) != HEAD.size:
        return None
    _, _, synced, _, checksum, _, size = HEAD.unpack(data)
    return RecordHead(synced, checksum, size)


def event_checksum(synced: int, event: bytes | memoryview) -> int:
    return crc32(event, _checksum_of_position(synced))


@lru_cache(maxsize=64)
def _checksum_of_position(synced: int) -> int:
    return crc32(synced.to_bytes(8))


# --- newest records ---------------------------------------------------------------------------------------------------


CACHE_BYTES = 64 << 20
"""Most bytes of cached records that are already on disk."""
LARGE_ROW_BYTES = 16 << 10
"""A record is cached as large if its rows have at least this many bytes on average."""

Appended = tuple[Event, list[EventArray], int]
"""An appended record: (event, arrays, length in bytes)."""


class RecentRecords:
    """In-memory cache of the newest records: all that may not be on disk yet and, up to `CACHE_BYTES`, those with large
    rows. Records with small rows are read back from the page cache."""

    def __init__(self) -> None:
        self.records: dict[int, Appended] = {}
        """Cached records, by their position in the journal."""
        self._small: deque[int] = deque()
        self._large: deque[int] = deque()
        """`_small`, `_large`: positions of the cached records with small and with large rows, oldest first."""
        self._large_bytes = self._unwritten_large_bytes = 0

    def add(self, position: int, appended: Appended) -> None:
        """Cache a record that has just been appended at `position`."""
        event, _, length = self.records[position] = appended
        if length >= LARGE_ROW_BYTES * event.weight:
            self._large.append(position)
            self._large_bytes += length
            self._unwritten_large_bytes += length
        else:
            self._small.append(position)

    def begin_sync(self) -> int:
        """Note that a sync begins; returns the bytes of the large records appended since the previous sync began."""
        unwritten_bytes, self._unwritten_large_bytes = self._unwritten_large_bytes, 0
        return unwritten_bytes

    def end_sync(self, end: int) -> None:
        """Drop the records before position `end`, which are on disk now, except the newest ones with large rows."""
        while self._small and self._small[0] < end:
            del self.records[self._small.popleft()]
        while self._large_bytes > CACHE_BYTES and self._large[0] < end:
            self._large_bytes -= self.records.pop(self._large.popleft())[2]
