"""The broker's only truth on disk: an append-only file of checksummed MessagePack records.

A record is the MessagePack array `[crc32, body]` in fixed-width form, `body` the MessagePack of one event, so
that any MessagePack reader can stream the file. `append` gives a reference that `read` understands; `sync`
puts everything appended on disk, and only after it may anything be acknowledged.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from april.broker.events import AnyEvent, Event

FILE_NAME = "journal.msgpack"
PREFIX = struct.Struct(">2sIcI")
"""array of two with a uint32, the crc32 of the body, bin32, the length of the body: 11 bytes"""
ARRAY_UINT32, BIN32 = b"\x92\xce", b"\xc6"

Reference = tuple[int, int]
"""(offset, length) of a record, bytes"""


class JournalError(RuntimeError):
    """The journal cannot be trusted or written any further."""


class Journal:
    """One writer. After a failed write or sync it refuses everything but reading."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(f"journal {self.path} is in use by another broker; stop that one first") from None
        self._pending: list[bytes] = []
        self._end = os.fstat(self._file).st_size
        self._written = self._synced = self._end
        self._failed: str | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyEvent)
        sync_folder(folder)

    def append(self, event: Event) -> Reference:
        """Queue one event; nothing is on disk before `sync`."""
        if self._failed:
            raise JournalError(self._failed)
        body = self._encoder.encode(event)
        reference = (self._end, PREFIX.size + len(body))
        self._pending += [PREFIX.pack(ARRAY_UINT32, zlib.crc32(body), BIN32, len(body)), body]
        self._end += reference[1]
        return reference

    @property
    def unsynced_bytes(self) -> int:
        return self._end - self._synced

    @property
    def bytes_on_disk(self) -> int:
        return self._written

    def sync(self) -> None:
        """Write and `fdatasync` what was appended. Raises JournalError, for good, if the disk refuses."""
        if self._failed:
            raise JournalError(self._failed)
        if self._synced == self._end:
            return
        self._write(durably=True)
        self._synced = self._end

    def _write(self, durably: bool) -> None:
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        try:
            while data:
                count = os.pwrite(self._file, data, self._written)
                self._written += count
                data = data[count:]
            if durably:
                os.fdatasync(self._file)
        except OSError as error:
            self._failed = f"journal {self.path} cannot be written ({error}); nothing is acknowledged any more"
            raise JournalError(self._failed) from error

    def read(self, reference: Reference) -> Event:
        """The event behind a reference that `append` or `replay` gave."""
        offset, length = reference
        if offset + length > self._written:
            self._write(durably=False)
        body = record_body(os.pread(self._file, length, offset))
        if body is None:
            raise JournalError(f"journal {self.path} is damaged at byte {offset}; restore it from a copy")
        return self._decoder.decode(body)

    def replay(self) -> Iterator[tuple[Event, Reference]]:
        """Every event with its reference, oldest first; a torn tail is cut off.

        A bad record with a good one behind it is damage and raises JournalError; otherwise it is what a crash
        left of the writes that no `sync` had finished.
        """
        offset = 0
        with self.path.open("rb") as file:
            while prefix := file.read(PREFIX.size):
                length = PREFIX.unpack(prefix)[3] if len(prefix) == PREFIX.size else 0
                body = record_body(prefix + file.read(min(length, self._end - offset)))
                if body is None:
                    self._cut_torn_tail(offset)
                    return
                yield self._decoder.decode(body), (offset, PREFIX.size + length)
                offset += PREFIX.size + length

    def _cut_torn_tail(self, offset: int) -> None:
        rest = os.pread(self._file, self._end - offset, offset)
        start, view = rest.find(ARRAY_UINT32, 1), memoryview(rest)
        while start >= 0:
            if record_body(view[start:], exact=False) is not None:
                raise JournalError(
                    f"journal {self.path} is damaged at byte {offset}, with good records from byte {offset + start}; "
                    "restore it from a copy"
                )
            start = rest.find(ARRAY_UINT32, start + 1)
        os.ftruncate(self._file, offset)
        os.fdatasync(self._file)
        self._end = self._written = self._synced = offset

    def close(self) -> None:
        if not self._failed:
            self.sync()
        os.close(self._file)


def record_body(record: bytes | memoryview, exact: bool = True) -> bytes | memoryview | None:
    """The body of a record if its form and checksum are right; `exact`: the bytes end with it."""
    if len(record) < PREFIX.size:
        return None
    array, checksum, binary, length = PREFIX.unpack_from(record)
    body = record[PREFIX.size : PREFIX.size + length]
    if (array, binary, len(body)) != (ARRAY_UINT32, BIN32, length) or zlib.crc32(body) != checksum:
        return None
    return body if not exact or len(record) == PREFIX.size + length else None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
