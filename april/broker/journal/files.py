"""Locates a run's journal, and reads its files without being their writer; closed files never change.

A file is named by the journal position at which it begins, and the next one begins where it ends.
"""

import bisect
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from april.broker.journal import records
from april.broker.ledger.events import AnyEvent, Event
from april.util.files import sync

SUFFIX = ".msgpack"
READ_BYTES = 4 << 20
"""Smallest read from a journal file, bytes."""

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

    def __init__(self, text: str, record: int = -1, offset: int = 0):
        super().__init__(text)
        self.record, self.offset = record, offset


def file_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}{SUFFIX}"


def file_starts(folder: Path) -> list[int]:
    """Positions at which the journal files of a folder begin, oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}"))


def read_records(file: int, size: int) -> Iterator[tuple[records.Record, int]]:
    """(record, offset) of each record in the first `size` bytes of an open file, up to the first incomplete one."""
    window_start = offset = 0
    window = b""
    while offset < size:
        record = records.decode(window, offset - window_start)
        if record is None and window_start + len(window) < size:
            needed = max(READ_BYTES, 2 * (len(window) - (offset - window_start)))
            window_start, window = offset, os.pread(file, needed, offset)
            continue
        if record is None:
            return
        yield record, offset
        offset += record.length


def read_closed(folder: Path, position: int, until: int) -> Iterator[tuple[Event, Reference]]:
    """(event, reference) of each record in the closed files from `position` to `until`, both starts of files.

    Raises Damaged if a record cannot be read, JournalError if a file is missing.
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


def reclaimable_files(starts: list[int], needed_from: int, live: Iterable[int]) -> list[int]:
    """Starts of the files that end at or before `needed_from` and contain no `live` position.

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
