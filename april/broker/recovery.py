"""A ledger rebuilt from a run's journal, and whether that journal still holds what the folder's other files prove.

A step has its line in metrics.jsonl, and the journal's end its note, only behind the sync that put them on disk; a
checkpoint contains batches that were delivered before. So whatever is ahead of the journal proves that it lost its end.
"""

import contextlib
import logging
import mmap
import os
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

import orjson
from zlib_ng.zlib_ng import crc32

from april.broker.journal import records
from april.broker.journal.files import SUFFIX, Damaged, JournalError
from april.broker.journal.journal import Journal
from april.broker.journal.place import journal_of
from april.broker.journal.snapshot import SnapshotStore
from april.broker.ledger.ledger import Ledger
from april.broker.plan import ledger_rules
from april.broker.replay import put_back
from april.broker.telemetry.lives import Lives
from april.broker.telemetry.past import read_lines
from april.config import Config
from april.formats.metrics import is_step
from april.formats.stored import StoredCheckpoints

log = logging.getLogger(__name__)

NOTE_FILE = "synced"
NOTE = struct.Struct(">QI")
"""position and its crc32"""
CHECKPOINT = re.compile(r"step_(\d{6,})")
TAIL_BYTES = 8 << 20
"""in which the last line of metrics.jsonl ends and begins"""
CHOICE = "april run CONFIG --resume --accept-loss"


class SyncNote:
    """Up to where a journal is on disk, noted beside it behind every sync.

    Nobody syncs the note itself: what a crash leaves of it is true, or older and true as well.
    """

    def __init__(self, folder: Path):
        self._path = folder / NOTE_FILE
        self._file: int | None = None

    @property
    def position(self) -> int:
        """0 where none was noted, or the note is torn."""
        data = self._path.read_bytes() if self._path.exists() else b""
        if len(data) < NOTE.size:
            return 0
        position, checksum = NOTE.unpack(data[: NOTE.size])
        return position if checksum == crc32(data[:8]) else 0

    def write(self, position: int) -> None:
        """A disk that takes no note has the one before, which is true as well."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._file, NOTE.pack(position, crc32(position.to_bytes(8))), 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def rebuild(
    ledger: Ledger, journal: Journal, snapshots: SnapshotStore, noted: int = 0, lives: Lives | None = None
) -> int:
    """Put an empty ledger into the state that is on disk, of which at least the first `noted` bytes were once synced;
    the position of the snapshot that it began with. Raises JournalError where the journal is damaged, or shorter."""
    journal.noted = noted
    try:
        return put_back(ledger, lives or Lives(ledger), snapshots, journal.replay)
    except Damaged as error:
        raise Damaged(f"{error}, or go on without what follows it: {CHOICE}") from None


def check_whole(run_dir: Path, journal: Journal, ledger: Ledger, stored: Collection[int] = ()) -> None:
    """Raises JournalError where the run folder proves that the journal has lost what was once in it, or a checkpoint in
    a store does; `stored`: their steps."""
    if lost := losses(run_dir, journal, ledger, stored):
        raise JournalError(
            f"journal {journal.folder} has lost acknowledged facts: {'; '.join(lost)}; restore it from a copy, or go "
            f"on without them: {CHOICE}"
        )


def losses(run_dir: Path, journal: Journal, ledger: Ledger, stored: Collection[int] = ()) -> list[str]:
    """What else was in a journal that `ledger` was rebuilt from."""
    found, step, checkpoints = [], last_step(run_dir / "metrics.jsonl"), {*checkpoints_of(run_dir), *stored}
    if (missing := journal.noted - journal.end) > 0:
        found.append(f"it ends at {journal.end} and was on disk up to {journal.noted}, {missing} bytes further")
    if step > ledger.frontier:
        found.append(f"metrics.jsonl has step {step}, and it {ledger.frontier} trained ones")
    if checkpoints and max(checkpoints) > ledger.next_step:
        found.append(f"there is a checkpoint of step {max(checkpoints)}, and it has {ledger.next_step} batches")
    return found


def last_step(metrics: Path) -> int:
    """Of the last whole line of one; 0 without one."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    with contextlib.suppress(orjson.JSONDecodeError, KeyError):
        for line in map(orjson.loads, reversed(lines)):
            if is_step(line):
                return int(line["step"])
    return 0


def checkpoints_of(run_dir: Path) -> dict[int, Path]:
    """Those of the learner, by step."""
    folder = run_dir / "checkpoints"
    found = ((CHECKPOINT.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return {int(name[1]): path for name, path in found if name}


def accept_loss(config: Config, stored: StoredCheckpoints | None = None) -> list[str]:
    """Make what is left of a run's journal the whole of it. What was given up for that, one sentence each.

    What is cut off is kept beside it, and so are checkpoints that nothing leads to any more, also `stored` ones. Raises
    JournalError where that is not enough to go on from, and StoreError.
    """
    in_store = stored.steps() if stored else set()
    run_dir, folder = config.run_dir, journal_of(config.run_dir)
    said = list(cut_damage(folder))
    ledger, journal, note = Ledger(ledger_rules(config)), Journal(folder), SyncNote(folder)
    try:
        rebuild(ledger, journal, SnapshotStore(folder))
        journal.noted = note.position
        said += losses(run_dir, journal, ledger, in_store)
        note.write(journal.end)
    finally:
        journal.close()
        note.close()
    for _ in read_lines(run_dir / "metrics.jsonl", ledger.frontier):
        pass  # it cuts off what follows
    for step, path in checkpoints_of(run_dir).items():
        if step > ledger.next_step:
            path.rename(path.with_suffix(".beyond"))
    for step in in_store:
        if stored and step > ledger.next_step:
            stored.set_aside(step, "beyond")
    return said


def cut_damage(folder: Path) -> Iterator[str]:
    """Take from the last journal file what follows its last whole record, into a file of its own."""
    path = max(folder.glob(f"*{SUFFIX}"), default=None)
    if path is None or not (size := path.stat().st_size):
        return
    good = 0
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        while record := records.decode(view, good):
            good, record = good + record.length, None
        tail = bytes(view[good:])
    if tail:
        path.with_suffix(f"{SUFFIX}.cut").write_bytes(tail)
        os.truncate(path, good)
        yield f"{len(tail)} bytes behind {int(path.stem) + good} cannot be read; they are in {path.name}.cut"
