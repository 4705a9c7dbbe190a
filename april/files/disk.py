"""Bytes onto a disk: written one behind the other, a few through the page cache, many past it, and synced."""

import contextlib
import errno
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

BUFFERS_PER_WRITE = 1000
"""the kernel takes at most 1024"""
BLOCK_BYTES = 4096
"""past the cache go whole blocks of a file, from memory that is aligned to them"""
STAGE_BYTES = 4 << 20

Buffer = bytes | memoryview


class Uncached:
    """Appends to a file past the page cache: on a virtual machine a fresh page of it may cost more than the write.

    Whole blocks go straight to the disk, copied to aligned memory before; the ends that share a block with what lies
    before or behind go through the cache.
    """

    def __init__(self, path: Path):
        """Raises OSError where the file system has no such way."""
        self._stage = mmap.mmap(-1, STAGE_BYTES)
        self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def write(self, file: int, pieces: Iterable[Buffer], offset: int) -> None:
        """Put pieces one behind the other from `offset` on; `file` is the same file, opened without this."""
        with memoryview(self._stage) as stage:
            begin = end = offset % BLOCK_BYTES
            base = offset - begin
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    count = min(len(left), STAGE_BYTES - end)
                    stage[end : end + count], left = left[:count], left[count:]
                    end += count
                    if end == STAGE_BYTES:
                        self._put(file, stage, begin, end, base)
                        base, begin, end = base + end, 0, 0
            self._put(file, stage, begin, end, base)

    def _put(self, file: int, stage: memoryview, begin: int, end: int, base: int) -> None:
        """Write what is staged from `begin` to `end`, of a stage whose first byte belongs at `base` of the file."""
        first = min(end, -(-begin // BLOCK_BYTES) * BLOCK_BYTES)
        last = max(first, end // BLOCK_BYTES * BLOCK_BYTES)
        write_all(file, stage[begin:first], base + begin)
        written = self._put_blocks(stage[first:last], base + first)
        write_all(file, stage[first + written : end], base + first + written)

    def _put_blocks(self, blocks: memoryview, offset: int) -> int:
        """How many bytes of them the disk has taken; the cache takes the rest, or has the disk say why it does not."""
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
    """None where the system or the file system has no such way."""
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
    """Put pieces on disk, one behind the other from `offset` on; how long the sync took (seconds).

    The page cache lets go of `unneeded_pages`, (file, offset, bytes). `uncached`: write past it.
    """
    for stretch in unneeded_pages:
        os.posix_fadvise(*stretch, os.POSIX_FADV_DONTNEED)
    if uncached:
        uncached.write(file, pieces, offset)
    else:
        rest = iter(pieces)
        while some := list(itertools.islice(rest, BUFFERS_PER_WRITE)):
            count = os.pwritev(file, some, offset)
            if count < (size := sum(map(len, some))):
                write_all(file, memoryview(b"".join(some))[count:], offset + count)
            offset += size
    began = time.monotonic()
    os.fdatasync(file)
    return time.monotonic() - began


def write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwritev(file, [data], offset)
        data, offset = data[count:], offset + count


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
