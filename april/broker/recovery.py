"""Recovery of a run: rebuilds the ledger, and checks the journal against the other files of the run folder.

A step's line in metrics.jsonl and the sync note are written only after the sync they refer to, and a checkpoint only
contains batches delivered before. If one of these files is ahead of the journal, the journal has lost its last records.
"""

import contextlib
import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from april.broker.journal import records
from april.broker.journal.files import (
    SUFFIX,
    Damaged,
    JournalError,
    file_path,
    file_starts,
    find_missing,
    journal_folder,
)
from april.broker.journal.journal import Journal
from april.broker.journal.snapshot import SnapshotStore, live_positions
from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.broker.plan import ledger_rules
from april.broker.snapshots import rebuild_ledger
from april.broker.telemetry.metrics_file import cut_lines, parse_line
from april.broker.telemetry.sample_history import SampleHistory
from april.config import Config
from april.config.stored import StoredCheckpoints, is_step
from april.util.files import PRIVATE_FILE

log = logging.getLogger(__name__)

NOTE_FILE = "synced"
NOTE = struct.Struct(">QI")
"""Layout of the sync note: position and its crc32."""
CHECKPOINT = re.compile(r"step_(\d{6,})")
TAIL_BYTES = 8 << 20
"""Bytes at the end of metrics.jsonl that are searched for its last complete record."""
ACCEPT_LOSS_COMMAND = "april run CONFIG --resume --accept-loss"
"""Command that continues a run without the events that its journal has lost."""


class SyncNote:
    """A file with the position up to which the journal is on disk, rewritten after every sync.

    The file itself is not synced: after a crash it may hold an older position, up to which the journal is on disk as
    well.
    """

    def __init__(self, folder: Path):
        self._path = folder / NOTE_FILE
        self._file: int | None = None

    @property
    def position(self) -> int:
        """Journal position that the file holds; 0 if there is no file or its content is torn."""
        data = self._path.read_bytes() if self._path.exists() else b""
        if len(data) < NOTE.size:
            return 0
        position, checksum = NOTE.unpack(data[: NOTE.size])
        return position if checksum == crc32(data[:8]) else 0

    def write(self, position: int) -> None:
        """Write the position to the file; a failed write leaves the previous position, which is still valid."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            os.pwrite(self._file, NOTE.pack(position, crc32(position.to_bytes(8))), 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def rebuild(
    ledger: Ledger, journal: Journal, snapshots: SnapshotStore, noted: int = 0, history: SampleHistory | None = None
) -> int:
    """Rebuild an empty ledger from disk; returns the journal position of the snapshot used.

    `noted`: position up to which the sync note says that the journal was synced. `history`: history of the samples
    (where and when each was generated), rebuilt from the same events; None: a new one. Raises JournalError if the
    journal is damaged, or lacks a file that has data of a group.
    """
    journal.known_synced = noted
    try:
        position = rebuild_ledger(ledger, history or SampleHistory(ledger), snapshots, journal.replay)
    except Damaged as error:
        raise Damaged(f"{error}, or go on without what follows it: {ACCEPT_LOSS_COMMAND}") from None
    if (missing := find_missing(journal.folder, live_positions(ledger))) is not None:
        raise JournalError(f"journal {journal.folder} lacks the file with position {missing}; restore it from a copy")
    return position


def check_complete(run_dir: Path, journal: Journal, ledger: Ledger, stored: Collection[int] = ()) -> None:
    """Compare the journal with metrics.jsonl and the checkpoints. Raises JournalError if they prove that the journal
    has lost its last records.

    `stored`: steps of checkpoints in an object store.
    """
    if lost := proofs_of_loss(run_dir, journal, ledger, stored):
        raise JournalError(
            f"journal {journal.folder} has lost acknowledged facts: {'; '.join(lost)}; restore it from a copy, or go "
            f"on without them: {ACCEPT_LOSS_COMMAND}"
        )


def proofs_of_loss(run_dir: Path, journal: Journal, ledger: Ledger, stored: Collection[int] = ()) -> list[str]:
    """One sentence for each proof that the journal from which `ledger` was rebuilt has lost its last records. `stored`:
    steps of checkpoints in an object store."""
    found, step, checkpoints = [], last_step(run_dir / "metrics.jsonl"), {*checkpoints_of(run_dir), *stored}
    if (missing := journal.known_synced - journal.end) > 0:
        found.append(f"it ends at {journal.end} and was on disk up to {journal.known_synced}, {missing} bytes further")
    if step > ledger.steps.frontier:
        found.append(f"metrics.jsonl has step {step}, and the journal has {ledger.steps.frontier}")
    if checkpoints and max(checkpoints) > ledger.steps.next:
        found.append(f"there is a checkpoint of step {max(checkpoints)}, and it has {ledger.steps.next} batches")
    return found


def last_step(metrics: Path) -> int:
    """Policy step in the last complete step record of metrics.jsonl; 0 without one."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    for record in map(parse_line, reversed(lines)):
        if record and is_step(record):
            return int(record["step"])
    return 0


def checkpoints_of(run_dir: Path) -> dict[int, Path]:
    """Folders of the learner's local checkpoints, by step."""
    folder = run_dir / "checkpoints"
    found = ((CHECKPOINT.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return {int(name[1]): path for name, path in found if name}


def accept_loss(config: Config, stored: StoredCheckpoints | None = None) -> list[str]:
    """Let a run continue with a damaged or shortened journal; returns one sentence for each loss.

    Bytes cut off are kept in a file next to the journal; checkpoints ahead of the journal are renamed, including those
    in the object store `stored` (None: there is no store). Raises JournalError if the rest of the journal is not enough
    to continue, and StoreError.
    """
    in_store = stored.steps() if stored else set()
    run_dir, folder = config.run_dir, journal_folder(config.run_dir)
    lost = list(cut_damaged_tail(folder))
    ledger, journal, note = Ledger(ledger_rules(config)), Journal(folder), SyncNote(folder)
    try:
        rebuild(ledger, journal, SnapshotStore(folder))
        journal.known_synced = note.position
        lost += proofs_of_loss(run_dir, journal, ledger, in_store)
        note.write(journal.end)
    finally:
        journal.close()
        note.close()
    cut_lines(run_dir / "metrics.jsonl", ledger.steps.frontier)
    for step, path in checkpoints_of(run_dir).items():
        if step > ledger.steps.next:
            path.rename(path.with_suffix(".beyond"))
    for step in in_store:
        if stored and step > ledger.steps.next:
            stored.set_aside(step, "beyond")
    return lost


def requeue(config: Config, groups: list[int]) -> list[int]:
    """Have prompts of groups with dead samples drawn again, by a record in the journal of a run whose broker is not
    running; returns the ids of those groups.

    `groups`: ids; if empty, all that can be queued again. Raises JournalError, also if a broker has the journal open.
    """
    folder = journal_folder(config.run_dir)
    with contextlib.closing(Journal(folder)) as journal:
        ledger = Ledger(ledger_rules(config), write=journal.append)
        rebuild(ledger, journal, SnapshotStore(folder), SyncNote(folder).position)
        ledger.clock = time.time()
        chosen = groups or ledger.dead_letters.discarded_groups()
        return [group for group in chosen if ledger.requeue(group) is Verdict.OK]


def cut_damaged_tail(folder: Path) -> Iterator[str]:
    """Move everything after the last complete record of the last journal file to a separate file; yields a sentence
    that says what was cut."""
    starts = file_starts(folder)
    if not starts or not (size := (path := file_path(folder, starts[-1])).stat().st_size):
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
