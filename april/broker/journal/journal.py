"""The write-ahead journal of the broker: an append-only sequence of checksummed records in files.

Positions count bytes from the beginning of the run; a file is named by the position at which it begins. `append`
returns a reference for `read`; `sync` puts everything appended on disk, and only then may anything be acknowledged.
When `file_full`, `rotate` begins a new file; the snapshot process applies closed files to the last snapshot, so that a
restart reads one snapshot and the records after it. `release_files` closes files before they are deleted.
"""

import bisect
import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from zlib_ng.zlib_ng import crc32

from april.broker.journal import records
from april.broker.journal.files import (
    Damaged,
    JournalError,
    Reference,
    checked_starts,
    file_path,
    file_starts,
    read_part,
    read_records,
    refused_reads,
)
from april.broker.journal.records import RecentRecords
from april.broker.ledger.chunk_refs import ChunkRef
from april.broker.ledger.events import AnyEvent, Event, EventArray
from april.util.files import BLOCK_BYTES, PRIVATE_FILE, Uncached, make_private, open_lock, open_uncached, write_and_sync
from april.util.versions import JOURNAL

log = logging.getLogger(__name__)

FILE_BYTES = 512 << 20
FILE_RECORDS = 500_000
"""Most records in a journal file; a table counts as its number of rows. Like the limit on bytes, it bounds the time of
a restart."""
CACHED_BYTES, RELEASE_BYTES = 1 << 30, 1 << 20
"""Number of newest bytes of the journal that stay in the page cache, and of bytes by which older ones are released.
Reusing released pages is cheaper than fresh memory for every record."""
UNCACHED_FROM_BYTES = 128 << 10
"""A sync bypasses the page cache if its large rows have at least this many bytes and make up half of the sync. Small
rows are often read back from the page cache when their response is complete."""


class Journal:
    """A journal with one writer, locked against others. After a failed write or sync the journal can only be read."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES, file_records: int = FILE_RECORDS):
        """`file_bytes`, `file_records`: size from which on a file is full. Raises JournalError if another broker uses
        the journal, OtherApril if another version of April wrote it."""
        make_private(folder)
        JOURNAL.claim(folder, new=not file_starts(folder))
        self.folder = folder
        self.file_bytes, self.file_records = file_bytes, file_records
        self._lock = open_lock(folder / "lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalError(f"journal {folder} is in use by another broker; stop that one first") from None
        self._files: dict[int, int] = {}
        self._uncached: Uncached | None = None
        """Second handle of the newest file, opened to bypass the page cache; None if the file system does not support
        that."""
        self._closed = False
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="journal-sync")
        try:
            self._open_files()
            self.bytes_on_disk = sum(map(self._size, self._starts))
            self.end = self._synced = self._starts[-1] + self._size(self._starts[-1])
        except (OSError, JournalError):
            self._close_files()
            raise
        self._pending: list[bytes | memoryview] = []
        self._recent = RecentRecords()
        self._records = 0
        self.known_synced = 0
        """Position up to which the journal has once been on disk, as far as known: bad bytes before it are damage."""
        self._failed: JournalError | None = None
        self._syncing: tuple[int, Callable[[], float]] | None = None
        """(position up to which the sync in progress writes, function that waits for its end); None without a sync."""
        self._in_thread: Future[float] | None = None
        self.on_sync_ended: Callable[[], None] = lambda: None
        """Callback at the end of a sync, called in the sync's thread."""
        self.sync_s = 0.0
        """Duration of the last sync, seconds."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyEvent)
        self._cached_from = self._synced

    def _open_files(self) -> None:
        for start in checked_starts(self.folder):
            self._files[start] = os.open(self._path(start), os.O_RDWR)
        self._starts = sorted(self._files)
        if not self._files:
            self._begin_file(0)
        else:
            self._uncached = open_uncached(self._path(self._starts[-1]))

    def _path(self, start: int) -> Path:
        return file_path(self.folder, start)

    def _begin_file(self, position: int) -> None:
        path, folder = self._path(position), os.open(self.folder, os.O_RDONLY)
        try:
            self._files[position] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
            os.fsync(folder)
        finally:
            os.close(folder)
        self._starts.append(position)
        if self._uncached:
            self._uncached.close()
        self._uncached = open_uncached(path)
        self._records = 0

    def _size(self, start: int) -> int:
        return os.fstat(self._files[start]).st_size

    # --- writing --------------------------------------------------------------------------------------------

    def append(self, event: Event, arrays: Sequence[EventArray] = ()) -> Reference:
        """Append an event and its arrays, to be written by the next sync; returns the reference of the record."""
        if self._failed:
            raise self._failed
        pieces, length = records.encode(self._synced, self._encoder.encode(event), arrays)
        reference = (self.end, length)
        self._pending += pieces
        self._recent.add(self.end, (event, list(arrays), length))
        self._records += event.weight
        self.end += length
        return reference

    @property
    def synced(self) -> int:
        """Position up to which the journal is on disk."""
        return self._synced

    @property
    def unsynced_bytes(self) -> int:
        return self.end - self._synced

    def sync(self) -> None:
        """Write everything appended to disk. Raises JournalError if that fails; the journal is then read-only."""
        self.begin_sync(in_thread=False)
        self.finish_sync()

    def begin_sync(self, in_thread: bool = True) -> None:
        """Begin to write and sync what was appended, after finishing the sync in progress.

        A thread does the work or, without `in_thread`, `finish_sync`.
        """
        self.finish_sync()
        if self._failed:
            raise self._failed
        if self._synced < self.end:
            start = self._starts[-1]
            old = self._old_pages()
            large = self._recent.begin_sync() >= max(UNCACHED_FROM_BYTES, self.unsynced_bytes / 2)
            uncached = self._uncached if large else None
            sync = partial(write_and_sync, self._files[start], self._pending, self._synced - start, old, uncached)
            self._pending, self._in_thread, self._syncing = [], None, (self.end, sync)
            if in_thread:
                self._in_thread = self._syncer.submit(sync)
                self._syncing = (self.end, self._in_thread.result)
                self._in_thread.add_done_callback(lambda _: self.on_sync_ended())

    def finish_sync(self) -> None:
        """Wait for the sync in progress. Raises JournalError if it failed; the journal is then read-only."""
        if self._syncing is None:
            return
        (end, wait), self._syncing = self._syncing, None
        try:
            self.sync_s = wait()
        except OSError as error:
            raise self.fail(error) from error
        self.bytes_on_disk += end - self._synced
        self._synced = end
        self._recent.end_sync(end)

    def _old_pages(self) -> list[tuple[int, int, int]]:
        """(file descriptor, offset, bytes) of each range of old journal data to release from the page cache."""
        ranges, until = [], self._synced - CACHED_BYTES
        while until - self._cached_from >= RELEASE_BYTES:
            index = max(0, bisect.bisect_right(self._starts, self._cached_from) - 1)
            start, later = self._starts[index], self._starts[index + 1 :]
            at = max(start, self._cached_from)
            stop = min(until - (until - start) % BLOCK_BYTES, later[0] if later else until)
            if at < stop:
                ranges.append((self._files[start], at - start, stop - at))
            self._cached_from = stop
        return ranges

    @property
    def syncing(self) -> bool:
        """Whether a sync was begun and `finish_sync` not called yet."""
        return self._syncing is not None

    @property
    def sync_runs(self) -> bool:
        """Whether a sync is running in the thread, so that `finish_sync` would block."""
        return self._in_thread is not None and not self._in_thread.done()

    def fail(self, error: OSError) -> JournalError:
        """Make the journal read-only after a failed write or sync; returns the JournalError to raise."""
        text = f"journal {self.folder} cannot be written ({error}); nothing is acknowledged any more"
        return self.give_up(JournalError(text, error.errno))

    def give_up(self, error: JournalError) -> JournalError:
        """Make the journal read-only, for the reason `error`, and cut off unsynced bytes, whose state on disk may be
        unknown; returns the error."""
        self._failed, self._pending, self._syncing = error, [], None
        self._await_writer()
        start = self._starts[-1]
        with contextlib.suppress(OSError):
            os.ftruncate(self._files[start], self._synced - start)
        return error

    def _await_writer(self) -> None:
        """Wait until the thread has finished its writes, so that no write follows a truncation of the file."""
        self._syncer.submit(lambda: None).result()

    @property
    def file_full(self) -> bool:
        """Whether the journal file is full, so that `rotate` should begin a new one."""
        return self.end - self._starts[-1] >= self.file_bytes or self._records >= self.file_records

    def rotate(self) -> int:
        """Sync, and begin a new file; returns the position at which it begins.

        Raises OSError if it cannot be opened: the present file then grows on.
        """
        self.sync()
        try:
            self._begin_file(self.end)
        except OSError as error:
            if self.end not in self._files:
                raise
            raise self.fail(error) from error
        return self.end

    @property
    def file_start(self) -> int:
        """Position at which the file being written begins; files before it never change."""
        return self._starts[-1]

    def release_files(self, starts: Iterable[int]) -> None:
        """Close journal files, given by their start positions, that another process is about to delete."""
        for start in self._files.keys() & set(starts):
            with contextlib.suppress(OSError):  # the count is a figure
                self.bytes_on_disk -= self._size(start)
            with contextlib.suppress(OSError):  # the descriptor is gone whatever the system says of it
                os.close(self._files.pop(start))
        self._starts = sorted(self._files)

    # --- reading --------------------------------------------------------------------------------------------

    def read(self, reference: Reference) -> tuple[Event, list[EventArray]]:
        """The event of a reference from `append` or `replay`, and its arrays. Raises Damaged or Unreadable."""
        position, length = reference
        if appended := self._recent.records.get(position):
            return appended[:2]
        record = records.decode(self._read(position, length))
        if record is None or record.length != length:
            raise self._damaged(position)
        return self._decoder.decode(record.event), record.arrays

    def read_payloads(self, refs: Iterable[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """(reference, payload) of each chunk, read alone and checked against its own checksum. Raises Damaged or
        Unreadable."""
        kept, starts, pread = self._recent.records, self._starts, os.pread
        file = begins = ends = 0
        for ref in refs:
            record, offset, size, checksum, _, _, _, _ = ref
            if appended := kept.get(record):
                _, [*_, (_, data)], length = appended
                begin = offset - (length - len(data))
                yield ref, memoryview(data)[begin : begin + size]
                continue
            if not begins <= record < ends:
                later = bisect.bisect_right(starts, record)
                begins, ends = starts[later - 1], starts[later] if later < len(starts) else self._synced
                file = self._files[begins]
            try:
                payload = pread(file, size, record - begins + offset)
            except OSError as error:
                refused_reads.add(self._path(begins), error)
                payload = read_part(self._path(begins), file, size, record - begins + offset)
            if len(payload) != size or crc32(payload) != checksum:
                raise self._damaged(record, offset)
            yield ref, memoryview(payload)

    def read_event(self, position: int) -> tuple[Event | None, int]:
        """(event, offset of its last array from the record's start) of the record at a position; (None, 0) if it is
        damaged. Raises Unreadable."""
        if appended := self._recent.records.get(position):
            event, [*_, (_, last)], length = appended
            return event, length - len(last)
        head = records.decode_head(self._read(position, records.HEAD.size))
        written = self._read(position + records.HEAD.size, head.size) if head else b""
        if head is None or records.event_checksum(head.synced, written) != head.checksum:
            return None, 0
        return self._decoder.decode(written), records.HEAD.size + head.size + records.ARRAY_HEAD.size

    def _read(self, position: int, length: int) -> bytes:
        start = self._starts[bisect.bisect_right(self._starts, position) - 1]
        return read_part(self._path(start), self._files[start], length, position - start)

    def _damaged(self, record: int, offset: int = 0) -> Damaged:
        text = f"journal {self.folder} is damaged at position {record}; restore it from a copy"
        return Damaged(text, record, offset)

    def replay(self, position: int = 0) -> Iterator[tuple[Event, Reference]]:
        """Yield (event, reference) of each record from `position`, the start of a file, to the end, oldest first.

        A torn tail, left by a crash during a sync, is cut off. Raises Damaged for a bad record that was once synced,
        JournalError for a missing file.
        """
        expected, last = position, None
        for start in [start for start in self._starts if start >= position]:
            if start != expected:
                raise JournalError(f"journal {self.folder} lacks the file at {expected}; restore it from a copy")
            self._records = 0
            for last, at in self._scan(start):
                event = self._decoder.decode(last.event)
                self._records += event.weight
                yield event, (at, last.length)
            expected = start + self._size(start)
        if expected == position and position not in self._files:
            raise JournalError(f"journal {self.folder} lacks the file at {position}; restore it from a copy")
        if last:
            self._write_again(max(last.synced, self._starts[-1]))

    def _write_again(self, position: int) -> None:
        """Write and sync again the bytes from `position` on, which the last sync may not have put on disk: after a
        failed sync the system may consider their pages clean and never write them."""
        start = self._starts[-1]
        tail = self._read(position, self.end - position)
        try:
            os.pwrite(self._files[start], tail, position - start)
            os.fdatasync(self._files[start])
        except OSError as error:
            raise self.fail(error) from error

    def _scan(self, start: int) -> Iterator[tuple[records.Record, int]]:
        """(record, position) of each record of the file that begins at position `start`; a torn tail of the last file
        is cut off."""
        size, end = self._size(start), 0
        for record, offset in read_records(self._path(start), self._files[start], size):
            end = offset + record.length
            yield record, start + offset
        if end < size:
            self._cut_torn_tail(start, end)

    def _cut_torn_tail(self, start: int, offset: int) -> None:
        """Cut off a torn tail: the bytes from `offset` on of the file that begins at position `start`. Raises Damaged
        if a later record, or `known_synced`, proves that it was synced."""
        bad = start + offset
        rest = self._read(bad, self._size(start) - offset)
        known = start != self._starts[-1] or bad < self.known_synced
        if known or any(synced > bad for _, synced in good_records(rest)):
            raise self._damaged(bad)
        log.warning("journal %s: %d bytes that no sync had finished are cut off", self.folder, len(rest))
        os.ftruncate(self._files[start], offset)
        os.fdatasync(self._files[start])
        self.bytes_on_disk -= len(rest)
        self.end = self._synced = bad

    def close(self) -> None:
        """Sync what is queued, unless a sync has failed, and close the files."""
        if not self._failed and not self._closed:
            self.sync()
        self._close_files()

    def _close_files(self) -> None:
        """Close all files, once: descriptor numbers are reused after that."""
        if self._closed:
            return
        self._closed = True
        self._syncer.shutdown()
        if self._uncached:
            self._uncached.close()
        for file in (*self._files.values(), self._lock):
            os.close(file)
        self._files.clear()


def good_records(data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, position up to which the journal was on disk when it was written) of each complete record in `data`."""
    for match in records.RECORD_START.finditer(data):
        if record := records.decode(data, match.start()):
            yield match.start(), record.synced
