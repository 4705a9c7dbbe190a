"""Verification of old journal files.

At a start the broker reads only the journal records after its snapshot. Older records would only be read when a batch
needs them; therefore a thread reads them once, slowly, and reports groups whose data is damaged while they can still be
discarded. Data that the operating system refuses to read may be intact, so it is read again later and never reported as
damaged.
"""

import logging
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from april.broker.images import DamagedImage
from april.broker.journal import records
from april.broker.journal.files import Damaged, Reference, Unreadable, file_path, file_starts, read_part
from april.broker.ledger.chunk_refs import ChunkRef
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Group, Sample
from april.util.lifetime import PartThread

log = logging.getLogger(__name__)

PAUSE_S = 0.02
"""Pause after each slice of reads, seconds, so that other users get disk and processor time."""
READS, READ_BYTES = 256, 1 << 20
"""Most reads, and most bytes, between two pauses of a verification."""
AGAIN_S = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Pauses before each further round over the groups that the system refused to read, seconds."""


class StoredGroup(NamedTuple):
    """A group to verify: its id, and the references to its data in the journal."""

    group: int
    prompt: Reference
    token_scores: set[Reference]
    samples: list[Sample]
    """Copies of the group's samples, made at the start of the verification."""


class JournalVerifier:
    """Reads, once, every journal record before position `below` that a ledger refers to.

    verifier = JournalVerifier(journal.folder, ledger, below=snapshot_position)
    verifier.start()
    verifier.take()          # ids of damaged groups found since the last call
    """

    def __init__(self, folder: Path, ledger: Ledger, below: int):
        self.folder, self.below = folder, below
        self._stored = [
            StoredGroup(
                group.id,
                group.prompt,
                token_score_records(group),
                [replace(sample) for sample in group.samples_with_forks],
            )
            for group in (ledger.groups.values() if below else ())
        ]
        self._found: deque[int] = deque()
        self._files: dict[int, int] = {}
        self._starts: list[int] = []
        self._stopped = threading.Event()
        self._thread = PartThread("verify", self._run)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[int]:
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            refused = self._round(self._stored)
            for pause_s in AGAIN_S:
                if not refused or self._stopped.wait(pause_s):
                    return
                refused = self._round(refused)
            if refused:
                log.error("%d groups in old journal files were not verified: the system refuses to read them. They are "
                          "kept, and read when a batch needs them", len(refused))  # fmt: skip
        finally:
            self._stored.clear()
            for file in self._files.values():
                os.close(file)

    def _round(self, groups: list[StoredGroup]) -> list[StoredGroup]:
        """Verify groups and note the damaged ones; returns those that the system refused to read."""
        reads, size, refused = 0, 0, []
        try:
            self._starts = file_starts(self.folder)
        except OSError:
            return groups
        for stored in groups:
            try:
                for check, length in self._checks(stored):
                    if not check():
                        self._found.append(stored.group)
                        break
                    reads, size = reads + 1, size + length
                    if reads >= READS or size >= READ_BYTES:
                        reads = size = 0
                        if self._stopped.wait(PAUSE_S):
                            return []
            except FileNotFoundError:
                pass  # deleted meanwhile, as no longer needed
            except Exception as error:
                if not isinstance(error, OSError | Unreadable):
                    log.exception("group %d cannot be verified", stored.group)
                refused.append(stored)
        return refused

    def _checks(self, stored: StoredGroup) -> Iterator[tuple[Callable[[], bool], int]]:
        """Yield, for each record or payload of a group that is before the journal position `self.below`: (function that
        returns whether it is intact, number of bytes that this reads)."""
        for position, length in (stored.prompt, *stored.token_scores):
            if position < self.below:
                yield partial(self._has_record, position, length), length
        for sample in stored.samples:
            for ref in sample.chunk_refs:
                if ref.record < self.below:
                    yield partial(self._has_payload, ref), ref.size

    def _has_record(self, position: int, length: int) -> bool:
        return records.decode(self._read(position, 0, length)) is not None

    def _has_payload(self, ref: ChunkRef) -> bool:
        payload = self._read(ref.record, ref.offset, ref.size)
        return len(payload) == ref.size and crc32(payload) == ref.checksum

    def _read(self, record: int, offset: int, size: int) -> bytes:
        """Read a part of a journal record. Raises Unreadable or OSError; FileNotFoundError if its file was deleted."""
        index = bisect_right(self._starts, record) - 1
        if index < 0:
            raise FileNotFoundError(f"no journal file has position {record}")
        start = self._starts[index]
        path = file_path(self.folder, start)
        if start not in self._files:
            self._files[start] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return read_part(path, self._files[start], size, record - start + offset)


def token_score_records(group: Group) -> set[Reference]:
    """References to the journal records with token scores of a group's samples."""
    return {(position, length) for position, length, *_ in (group.token_scores or {}).values()}


def images_of(group: Group) -> set[str]:
    """Names of the images of a group's prompt and of its sessions."""
    return {*group.images, *(name for sample in group.samples_with_forks for name, _ in sample.images)}


def groups_with_damage(ledger: Ledger, damaged: Damaged) -> list[Group]:
    """The groups of a ledger whose data includes the journal bytes that `damaged` names."""
    if isinstance(damaged, DamagedImage):
        return [group for group in ledger.groups.values() if damaged.name in images_of(group)]
    record, offset = damaged.record, damaged.offset
    return [
        group
        for group in ledger.groups.values()
        if record in {position for position, _ in (group.prompt, *token_score_records(group))}
        or any(ref[:2] == (record, offset) for sample in group.samples_with_forks for ref in sample.chunk_refs)
    ]
