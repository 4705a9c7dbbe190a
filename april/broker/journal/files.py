"""What is in journal files, read without being the one who writes them; those that are closed change no more.

A file is named by the position at which it begins, and the next one begins where it ends.
"""

import bisect
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from april.broker.journal import records
from april.broker.ledger.events import AnyEvent, Event

SUFFIX = ".msgpack"
READ_BYTES = 4 << 20

Reference = tuple[int, int]
"""(position, length) of a record, bytes"""


class JournalError(RuntimeError):
    """The journal cannot be trusted or written any further."""

    def __init__(self, text: str, errno: int | None = None):
        super().__init__(text)
        self.errno = errno
        """of the system's refusal, None for damage"""


class Damaged(JournalError):
    """Bytes that were once on disk cannot be read back: of a record, or those at `offset` of it."""

    def __init__(self, text: str, record: int = -1, offset: int = 0):
        super().__init__(text)
        self.record, self.offset = record, offset


def file_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}{SUFFIX}"


def file_starts(folder: Path) -> list[int]:
    """The positions at which its files begin, the oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}"))


def read_records(file: int, size: int) -> Iterator[tuple[records.Record, int]]:
    """The records of an open file's first `size` bytes, each with its offset, up to the first that is not whole."""
    at = offset = 0
    window = b""
    while offset < size:
        record = records.decode(window, offset - at)
        if record is None and at + len(window) < size:
            needed = max(READ_BYTES, 2 * (len(window) - (offset - at)))
            at, window = offset, os.pread(file, needed, offset)
            continue
        if record is None:
            return
        yield record, offset
        offset += record.length


def read_closed(folder: Path, position: int, until: int) -> Iterator[tuple[Event, Reference]]:
    """Every event between two positions at which files begin, with its reference, oldest first.

    Raises Damaged where something of it cannot be read, JournalError where a file is missing.
    """
    decoder = msgspec.msgpack.Decoder(AnyEvent)
    while position < until:
        path = file_path(folder, position)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise JournalError(f"journal {folder} lacks the file at {position}; restore it from a copy") from None
        start = position
        try:
            for record, offset in read_records(file, os.fstat(file).st_size):
                position = start + offset + record.length
                yield decoder.decode(record.event), (start + offset, record.length)
            if position == start or position - start < os.fstat(file).st_size:
                raise Damaged(f"journal {folder} is damaged at position {position}; restore it from a copy", position)
        finally:
            os.close(file)


def unneeded(starts: list[int], needed_from: int, live: Iterable[int]) -> list[int]:
    """Which of the files that begin at these positions end at or below `needed_from` and hold no `live` position."""
    kept = {starts[bisect.bisect_right(starts, position) - 1] for position in live}
    return [start for start, end in pairwise(starts) if end <= needed_from and start not in kept]
