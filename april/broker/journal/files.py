"""Locates a run's journal, and reads its files without being their writer; closed files never change.

A file is named by the journal position at which it begins, and the next one begins where it ends. A read that the
system refuses is tried again: only bytes that were read, and have a wrong checksum, are damaged.
"""

import bisect
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from april.broker.journal import records
from april.broker.ledger.events import AnyEvent, Event
from april.util.files import sync

log = logging.getLogger(__name__)

SUFFIX = ".msgpack"
FILE_NAME = re.compile(r"\d{20}" + re.escape(SUFFIX))
READ_BYTES = 4 << 20
"""Least bytes that are asked for in one read from a journal file."""
READ_AGAIN_S = (0.0, 0.02, 0.1)
"""Seconds to wait before each retry of a read that the system refused; short, since the broker's loop waits as well."""

Reference = tuple[int, int]
"""(position, length) of a record in the journal, bytes."""


class JournalError(RuntimeError):
    """The journal is damaged, incomplete or cannot be written."""

    def __init__(self, text: str, errno: int | None = None):
        super().__init__(text)
        self.errno = errno
        """Error number of a failed system call; None otherwise."""


class Damaged(JournalError):
    """Raised for bytes that were once on disk and cannot be read back: at `offset` in the journal record at position
    `record`."""

    is_of_journal = True
    """Whether the damaged bytes are the journal's own, not those of an image's file beside it (False in a subclass): if
    so, nothing is written until an operator has dealt with the damage."""

    def __init__(self, text: str, record: int = -1, offset: int = 0):
        super().__init__(text)
        self.record, self.offset = record, offset


class Unreadable(JournalError):
    """Raised if the system refuses to read `size` bytes at `offset` of the journal file at `path`, also when retried.
    The bytes may be intact, so nothing is discarded."""

    def __init__(self, path: Path, size: int, offset: int, error: OSError):
        super().__init__(f"journal file {path} cannot be read ({error}); its reads are tried again", error.errno)
        self.path, self.size, self.offset = path, size, offset


def file_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}{SUFFIX}"


def file_starts(folder: Path) -> list[int]:
    """Positions at which the journal files of a folder begin, oldest first; other files do not count."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if FILE_NAME.fullmatch(path.name))


def checked_starts(folder: Path) -> list[int]:
    """Positions at which the journal files of a folder begin, oldest first, after a check: a file whose name is not a
    journal file's is logged and left alone.

    Raises JournalError if two files overlap, so that some journal position lies in both.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        if not FILE_NAME.fullmatch(path.name):
            log.warning("%s is no file of the journal, and is left alone", path)
    starts = file_starts(folder)
    for start, later in pairwise(starts):
        if start + file_path(folder, start).stat().st_size > later:
            text = f"journal {folder} has position {later} in two files; remove the one that is not its own"
            raise JournalError(text)
    return starts


def find_missing(folder: Path, positions: Iterable[int]) -> int | None:
    """The first of the journal `positions` that lies in a gap between the files of a journal's folder; None if none
    does."""
    bounds = [0]
    """Journal positions at which, alternately, a gap and the file after it begin (a gap may be empty); the last is the
    end of the last file."""
    for start in file_starts(folder):
        bounds += [start, start + file_path(folder, start).stat().st_size]
    if bounds[::2] == [*bounds[1::2], bounds[-1]]:
        return None
    return next((at for at in positions if bisect.bisect_right(bounds[:-1], at) % 2), None)


class RefusedReads:
    """Counts the calls, since the process started, with which the system refused to read a part of the journal."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, path: Path, error: OSError) -> None:
        self.count += 1
        if self.count.bit_count() == 1:
            log.warning("journal file %s: a read was refused (%s), the %d. in all", path, error, self.count)


refused_reads = RefusedReads()


def read_part(path: Path, file: int, size: int, offset: int, pauses_s: Sequence[float] = READ_AGAIN_S) -> bytes:
    """Up to `size` bytes at `offset` of the journal file at `path`, open as the descriptor `file`; fewer only at its
    end.

    A read that the system refuses is tried again after each of the pauses `pauses_s`, with a new file descriptor, as
    the old one may be stale. Raises Unreadable after the last.
    """
    try:
        return os.pread(file, size, offset)
    except OSError as error:
        refused_reads.add(path, error)
        last = error
    for pause_s in pauses_s:
        time.sleep(pause_s)
        try:
            return read_by_name(path, size, offset)
        except OSError as error:
            refused_reads.add(path, error)
            last = error
    raise Unreadable(path, size, offset, last) from last


def read_by_name(path: Path, size: int, offset: int) -> bytes:
    """Up to `size` bytes at `offset` of a file that is opened for this read alone. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)


def read_records(path: Path, file: int, size: int) -> Iterator[tuple[records.Record, int]]:
    """(record, offset) of each record in the first `size` bytes of the file at `path`, open as the descriptor `file`,
    up to the first incomplete one. Raises Unreadable."""
    window_start = offset = 0
    window = b""
    while offset < size:
        record = records.decode(window, offset - window_start)
        if record is None and window_start + len(window) < size:
            needed = max(READ_BYTES, 2 * (len(window) - (offset - window_start)))
            window_start, window = offset, read_part(path, file, needed, offset)
            continue
        if record is None:
            return
        yield record, offset
        offset += record.length


def read_closed(folder: Path, position: int, until: int) -> Iterator[tuple[Event, Reference]]:
    """(event, reference) of each record in the closed files from `position` to `until`, both starts of files.

    Raises Damaged for a bad record, JournalError if a file is missing or cannot be read.
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
            for record, offset in read_records(path, file, os.fstat(file).st_size):
                position = start + offset + record.length
                yield decoder.decode(record.event), (start + offset, record.length)
            if position == start or position - start < os.fstat(file).st_size:
                raise Damaged(f"journal {folder} is damaged at position {position}; restore it from a copy", position)
        finally:
            os.close(file)


def reclaimable_files(starts: list[int], needed_from: int, live: Iterable[int]) -> list[int]:
    """Start positions of the files that may be deleted: of all files, which begin at `starts`, those that end at or
    before position `needed_from` and contain none of the `live` positions.

    The last file is never included.
    """
    kept = {starts[bisect.bisect_right(starts, position) - 1] for position in live}
    return [start for start, end in pairwise(starts) if end <= needed_from and start not in kept]


# --- the journal's folder ---------------------------------------------------------------------------------------------


def journal_folder(run_dir: Path) -> Path:
    """Folder of a run's journal, which need not exist yet. Raises JournalError if its disk is not mounted."""
    folder = run_dir / "journal"
    if folder.is_symlink() and not folder.is_dir():
        raise JournalError(f"journal {folder} lies in {folder.readlink()}, which is not here; mount that disk")
    return folder


def locate_journal(run_dir: Path, journal_dir: Path | None) -> Path:
    """Find the folder of a run's journal; a new journal goes into a new subfolder of `journal_dir`, if that is given.
    Raises JournalError if an existing journal lies elsewhere or the subfolder is in use, and OSError."""
    folder = journal_folder(run_dir)
    if journal_dir is None:
        return folder
    wanted = journal_dir / run_dir.name
    if not os.path.lexists(folder):
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise JournalError(
                f"folder {wanted} has another run's journal; remove it, or choose another run.name. If it is this "
                f"run's, make {folder} a link to it"
            )
        folder.symlink_to(wanted)
        sync(run_dir)
    elif not (wanted.is_dir() and folder.samefile(wanted)):
        raise JournalError(
            f"journal {folder} lies in {folder.resolve()} and not in {wanted}; give key 'broker.journal_dir' as it "
            "was, or move the journal there and make the former a link to it"
        )
    return folder
