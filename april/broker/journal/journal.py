"""The broker's only truth on disk: an append-only sequence of checksummed records in files.

Positions count bytes from the beginning of the run; a file is named by the position at which it begins.
`append` gives a reference that `read` understands; `sync` puts everything appended on disk, and only after it
may anything be acknowledged. When `file_full` says so, `rotate` begins a new file, and somebody applies those that are
closed to the last snapshot of the ledger, so that a restart reads one snapshot and what follows it. `let_go` parts from
files that are to be deleted.
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
from april.broker.journal.files import SUFFIX, Damaged, JournalError, Reference, file_path, read_records
from april.broker.journal.recent import KEPT_FROM, Appended, RecentRecords
from april.broker.ledger.events import AnyEvent, Event, Part
from april.broker.ledger.places import Place
from april.files.disk import BLOCK_BYTES, Uncached, open_uncached, write_and_sync
from april.formats.versions import JOURNAL
from april.processes.descriptors import NO_DESCRIPTORS

log = logging.getLogger(__name__)

FILE_BYTES = 512 << 20
FILE_RECORDS = 500_000
"""a file ends after this many records at the latest, each row of a table counted as one: they bound the time of a
restart as the bytes do"""
CACHED_BYTES, LET_GO_BYTES = 1 << 30, 1 << 20
"""of what was written last, the system keeps so much in its page cache for reading; older pages are let go, so much at
a time, and used again: taking fresh memory for every record costs more than copying it"""
UNCACHED_FROM = 128 << 10
"""where most of what is synced at once, and at least so many bytes of it, is large rows, it is written past the page
cache. Small rows are read when their response is whole, much later, and often from there"""


class Journal:
    """One writer. After a failed write or sync it refuses everything but reading."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES, file_records: int = FILE_RECORDS):
        """Raises JournalError, or OtherApril where it is not of this one."""
        folder.mkdir(parents=True, exist_ok=True)
        JOURNAL.claim(folder, new=not any(folder.glob(f"*{SUFFIX}")))
        self.folder = folder
        self.file_bytes, self.file_records = file_bytes, file_records
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalError(f"journal {folder} is in use by another broker; stop that one first") from None
        self._files: dict[int, int] = {}
        self._uncached: Uncached | None = None
        """the newest file, past the page cache"""
        self._closed = False
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="journal-sync")
        try:
            self._open_files()
        except OSError:
            self._close_files()
            raise
        self._pending: list[bytes | memoryview] = []
        self._unwritten: dict[int, Appended] = {}
        self._in_sync: dict[int, Appended] = {}
        """by position, what was appended since the last sync began, and what that one writes"""
        self._recent = RecentRecords()
        self._records = 0
        self.noted = 0
        """position below which others know that everything was once on disk: what is bad there is damage"""
        self._failed: JournalError | None = None
        self._syncing: tuple[int, Callable[[], float]] | None = None
        """position up to which the sync under way reaches, and how to wait for it"""
        self._aside: Future[float] | None = None
        self.on_sync_ended: Callable[[], None] = lambda: None
        """called in the thread of a sync aside"""
        self.sync_s = 0.0
        """how long the last sync took"""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyEvent)
        self.end = self._synced = self._starts[-1] + self._size(self._starts[-1])
        self._cached_from = self._synced
        self.bytes_on_disk = sum(map(self._size, self._starts))

    def _open_files(self) -> None:
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            self._files[int(path.stem)] = os.open(path, os.O_RDWR)
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
            self._files[position] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
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

    def append(self, event: Event, arrays: Sequence[Part] = ()) -> Reference:
        """Queue one event and its arrays; nothing is on disk before `sync`."""
        if self._failed:
            raise self._failed
        pieces, length = records.encode(self._synced, self._encoder.encode(event), arrays)
        reference = (self.end, length)
        self._pending += pieces
        self._unwritten[self.end] = appended = event, list(arrays), length
        if length >= KEPT_FROM * event.weight:
            self._recent.keep(self.end, appended)
        self._records += event.weight
        self.end += length
        return reference

    @property
    def synced(self) -> int:
        """Position up to which everything is on disk."""
        return self._synced

    @property
    def unsynced_bytes(self) -> int:
        return self.end - self._synced

    def sync(self) -> None:
        """Put everything that was appended on disk. Raises JournalError, for good, if the disk refuses."""
        self.begin_sync(aside=False)
        self.finish_sync()

    def begin_sync(self, aside: bool = True) -> None:
        """Begin to write and sync what was appended: in a thread, while the caller goes on, or only in
        `finish_sync`. One sync is under way at a time."""
        self.finish_sync()
        if self._failed:
            raise self._failed
        if self._synced < self.end:
            start = self._starts[-1]
            old = self._old_pages()
            large = self._recent.begin_sync() >= max(UNCACHED_FROM, self.unsynced_bytes / 2)
            uncached = self._uncached if large else None
            sync = partial(write_and_sync, self._files[start], self._pending, self._synced - start, old, uncached)
            self._pending, self._unwritten, self._in_sync = [], {}, self._unwritten
            self._aside, self._syncing = None, (self.end, sync)
            if aside:
                self._aside = self._syncer.submit(sync)
                self._syncing = (self.end, self._aside.result)
                self._aside.add_done_callback(lambda _: self.on_sync_ended())

    def finish_sync(self) -> None:
        """Wait until the sync that was begun is done. Raises JournalError, for good, if the disk refuses."""
        if self._syncing is None:
            return
        (end, wait), self._syncing = self._syncing, None
        try:
            self.sync_s = wait()
        except OSError as error:
            raise self.fail(error) from error
        self.bytes_on_disk += end - self._synced
        self._synced = end
        self._in_sync = {}

    def _old_pages(self) -> list[tuple[int, int, int]]:
        """(file, offset, bytes) of what need not be in the page cache any longer."""
        stretches, until = [], self._synced - CACHED_BYTES
        while until - self._cached_from >= LET_GO_BYTES:
            index = max(0, bisect.bisect_right(self._starts, self._cached_from) - 1)
            start, later = self._starts[index], self._starts[index + 1 :]
            at = max(start, self._cached_from)
            stop = min(until - (until - start) % BLOCK_BYTES, later[0] if later else until)
            if at < stop:
                stretches.append((self._files[start], at - start, stop - at))
            self._cached_from = stop
        return stretches

    @property
    def syncing(self) -> bool:
        """Whether a sync was begun and not finished."""
        return self._syncing is not None

    @property
    def sync_runs(self) -> bool:
        """Whether `finish_sync` would have to wait for the thread."""
        return self._aside is not None and not self._aside.done()

    def fail(self, error: OSError) -> JournalError:
        """Write no more and forget what no sync has finished: nobody knows what of it is on disk."""
        text = f"journal {self.folder} cannot be written ({error}); nothing is acknowledged any more"
        self._failed, self._pending, self._syncing = JournalError(text, error.errno), [], None
        self._await_writer()
        start = self._starts[-1]
        with contextlib.suppress(OSError):
            os.ftruncate(self._files[start], self._synced - start)
        return self._failed

    def _await_writer(self) -> None:
        """Until the thread has written what it was given, lest it goes on behind a cut."""
        self._syncer.submit(lambda: None).result()

    @property
    def file_full(self) -> bool:
        """Time for a snapshot and `rotate`."""
        return self.end - self._starts[-1] >= self.file_bytes or self._records >= self.file_records

    def rotate(self) -> int:
        """Begin a new file behind what is synced; returns the position at which it begins.

        Raises OSError where there is no descriptor for it: then the present file goes on growing.
        """
        self.sync()
        try:
            self._begin_file(self.end)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            raise self.fail(error) from error
        return self.end

    @property
    def file_begins(self) -> int:
        """Position of the file that is written; those below it change no more."""
        return self._starts[-1]

    def let_go(self, starts: Iterable[int]) -> None:
        """Part from closed files, by where they begin; somebody else deletes them then, which takes a while."""
        for start in self._files.keys() & set(starts):
            self.bytes_on_disk -= self._size(start)
            os.close(self._files.pop(start))
        self._starts = sorted(self._files)

    # --- reading --------------------------------------------------------------------------------------------

    def read(self, reference: Reference) -> tuple[Event, list[Part]]:
        """The event behind a reference that `append` or `replay` gave, and its arrays."""
        position, length = reference
        if appended := self._in_memory(position):
            return appended[:2]
        record = records.decode(self._read(position, length))
        if record is None or record.length != length:
            raise self._damaged(position)
        return self._decoder.decode(record.event), record.arrays

    def read_payloads(self, places: Iterable[Place]) -> Iterator[tuple[Place, memoryview]]:
        """The own bytes of rows, whatever else their records hold, each held against its own checksum."""
        kept, starts, pread = self._recent.records, self._starts, os.pread
        file = begins = ends = 0
        for place in places:
            record, offset, size, checksum, _, _, _, _ = place
            if record >= self._synced or record in kept:
                _, [*_, (_, data)], length = self._unwritten.get(record) or self._in_sync.get(record) or kept[record]
                begin = offset - (length - len(data))
                yield place, memoryview(data)[begin : begin + size]
                continue
            if not begins <= record < ends:
                later = bisect.bisect_right(starts, record)
                begins, ends = starts[later - 1], starts[later] if later < len(starts) else self._synced
                file = self._files[begins]
            payload = pread(file, size, record - begins + offset)
            if len(payload) != size or crc32(payload) != checksum:
                raise self._damaged(record, offset)
            yield place, memoryview(payload)

    def read_event(self, position: int) -> tuple[Event | None, int]:
        """The event of a record and where its one array begins; None if it cannot be read."""
        if appended := self._in_memory(position):
            event, [*_, (_, last)], length = appended
            return event, length - len(last)
        head = records.decode_head(self._read(position, records.HEAD.size))
        written = self._read(position + records.HEAD.size, head.size) if head else b""
        if head is None or records.event_checksum(head.synced, written) != head.checksum:
            return None, 0
        return self._decoder.decode(written), records.HEAD.size + head.size + records.PART.size

    def _in_memory(self, position: int) -> Appended | None:
        return self._recent.records.get(position) or self._unwritten.get(position) or self._in_sync.get(position)

    def _read(self, position: int, length: int) -> bytes:
        start = self._starts[bisect.bisect_right(self._starts, position) - 1]
        return os.pread(self._files[start], length, position - start)

    def _damaged(self, record: int, offset: int = 0) -> Damaged:
        text = f"journal {self.folder} is damaged at position {record}; restore it from a copy"
        return Damaged(text, record, offset)

    def replay(self, position: int = 0) -> Iterator[tuple[Event, Reference]]:
        """Every event from `position` on with its reference, oldest first; a torn tail is cut off.

        `position` is 0 or one at which a file begins. A bad record that was once synced is damage and raises
        JournalError; otherwise it is what a crash left of the writes that no `sync` had finished.
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
        """What the last sync may not have reached is made dirty again: after a failed sync the system may take it
        for clean and never write it."""
        start = self._starts[-1]
        tail = os.pread(self._files[start], self.end - position, position - start)
        try:
            os.pwrite(self._files[start], tail, position - start)
            os.fdatasync(self._files[start])
        except OSError as error:
            raise self.fail(error) from error

    def _scan(self, start: int) -> Iterator[tuple[records.Record, int]]:
        """The records of a file; the tail of the last one may be torn."""
        size, end = self._size(start), 0
        for record, offset in read_records(self._files[start], size):
            end = offset + record.length
            yield record, start + offset
        if end < size:
            self._cut_torn_tail(start, end)

    def _cut_torn_tail(self, start: int, offset: int) -> None:
        """Cut what no sync had finished; raises JournalError if a later record proves that it was synced."""
        bad = start + offset
        rest = os.pread(self._files[start], self._size(start) - offset, offset)
        known = start != self._starts[-1] or bad < self.noted
        if known or any(synced > bad for _, synced in good_records(rest)):
            raise self._damaged(bad)
        log.warning("journal %s: %d bytes that no sync had finished are cut off", self.folder, len(rest))
        os.ftruncate(self._files[start], offset)
        os.fdatasync(self._files[start])
        self.bytes_on_disk -= len(rest)
        self.end = self._synced = bad

    def close(self) -> None:
        """Let go of the files; what is still queued is synced first, unless the disk has refused."""
        if not self._failed and not self._closed:
            self.sync()
        self._close_files()

    def _close_files(self) -> None:
        """Once: the numbers of closed descriptors belong to others."""
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
    """(offset, synced) of every whole record somewhere in `data`."""
    for form in records.FORM.finditer(data):
        if record := records.decode(data, form.start()):
            yield form.start(), record.synced
