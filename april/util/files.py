"""Durable writes: appending and syncing, through the page cache or with direct I/O past it, and atomic replacement."""

import contextlib
import errno
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

BUFFERS_PER_WRITE = 1000
"""Buffers per vectored write; the kernel accepts at most 1024."""
BLOCK_BYTES = 4096
"""Direct I/O writes whole blocks of this size, from memory with this alignment."""
STAGE_BYTES = 4 << 20
"""Size of the aligned staging buffer."""

Buffer = bytes | memoryview


class Uncached:
    """Appends to a file with direct I/O: on a virtual machine a new page in the page cache may cost more than the
    write.

    Whole blocks are copied to aligned memory and written to the disk. Partial blocks at both ends go through the page
    cache.
    """

    def __init__(self, path: Path):
        """Raises OSError if the file system has no direct I/O."""
        self._stage = mmap.mmap(-1, STAGE_BYTES)
        self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def write(self, file: int, pieces: Iterable[Buffer], offset: int) -> None:
        """Write the pieces, concatenated, at `offset`. `file`: a descriptor of the same file without direct I/O."""
        with memoryview(self._stage) as stage:
            begin = end = offset % BLOCK_BYTES
            base = offset - begin
            for piece in pieces:
                unwritten = memoryview(piece)
                while unwritten:
                    count = min(len(unwritten), STAGE_BYTES - end)
                    stage[end : end + count], unwritten = unwritten[:count], unwritten[count:]
                    end += count
                    if end == STAGE_BYTES:
                        self._put(file, stage, begin, end, base)
                        base, begin, end = base + end, 0, 0
            self._put(file, stage, begin, end, base)

    def _put(self, file: int, stage: memoryview, begin: int, end: int, base: int) -> None:
        """Write bytes `begin` to `end` of the staging buffer, whose first byte belongs at offset `base` of the file."""
        first = min(end, -(-begin // BLOCK_BYTES) * BLOCK_BYTES)
        last = max(first, end // BLOCK_BYTES * BLOCK_BYTES)
        write_all(file, stage[begin:first], base + begin)
        written = self._put_blocks(stage[first:last], base + first)
        write_all(file, stage[first + written : end], base + first + written)

    def _put_blocks(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks with direct I/O; returns the bytes written. The caller writes the rest through the cache,
        which also reports a persistent error."""
        try:
            return os.pwritev(self._direct, [blocks], offset) if blocks else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0

    def close(self) -> None:
        os.close(self._direct)
        self._stage.close()


def open_uncached(path: Path) -> Uncached | None:
    """An `Uncached` writer; None if the system or the file system has no direct I/O."""
    with contextlib.suppress(OSError, AttributeError):
        return Uncached(path)
    return None


def write_and_sync(
    file: int,
    pieces: list[Buffer],
    offset: int,
    unneeded_pages: Sequence[tuple[int, int, int]] = (),
    uncached: Uncached | None = None,
) -> float:
    """Write the pieces, concatenated, at `offset`, and sync; returns the seconds that the sync took.

    `unneeded_pages`: (file, offset, bytes) of ranges to drop from the page cache. `uncached`: write with direct I/O.
    """
    for page_range in unneeded_pages:
        os.posix_fadvise(*page_range, os.POSIX_FADV_DONTNEED)
    if uncached:
        uncached.write(file, pieces, offset)
    else:
        remaining = iter(pieces)
        while buffers := list(itertools.islice(remaining, BUFFERS_PER_WRITE)):
            count = os.pwritev(file, buffers, offset)
            if count < (size := sum(map(len, buffers))):
                write_all(file, memoryview(b"".join(buffers))[count:], offset + count)
            offset += size
    began = time.monotonic()
    os.fdatasync(file)
    return time.monotonic() - began


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, however many calls it takes."""
    while data:
        count = os.pwritev(file, [data], offset)
        data, offset = data[count:], offset + count


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file anew; readers see the old or the new content, never a part."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(data)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    temporary.replace(path)
