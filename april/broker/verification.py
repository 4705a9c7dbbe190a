"""Read in the background after a start: what old journal files still have to give.

A start checks what lies behind its snapshot. What lies below it would only be looked at when a batch needs it; so it is
read once, by a thread, slowly, and what cannot be read is said while there is still time to do without.
"""

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

from april.broker.journal import records
from april.broker.journal.files import SUFFIX, Damaged, Reference
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.places import Place
from april.broker.ledger.samples import Group, Sample

PAUSE_S = 0.02
"""after every so many reads or bytes: others need the disk and the processor more"""
READS, READ_BYTES = 256, 1 << 20


class Stored(NamedTuple):
    """Of a group, where the journal has it."""

    group: int
    prompt: Reference
    samples: list[Sample]
    """as they were"""


class Verifier:
    """Looks once through what a ledger has below a position.

    verifier = Verifier(journal.folder, ledger, below=snapshot_position)
    verifier.start()
    verifier.take()          # groups that cannot be read, since the last call
    """

    def __init__(self, folder: Path, ledger: Ledger, below: int):
        self.folder, self.below = folder, below
        self._stored = [
            Stored(group.id, group.prompt, [replace(line) for line in group.lines])
            for group in (ledger.groups.values() if below else ())
        ]
        self._found: deque[int] = deque()
        self._files: dict[int, int] = {}
        self._starts: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[int]:
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._starts = sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}"))
        reads = size = 0
        try:
            for stored in self._stored:
                for check, length in self._checks(stored):
                    if not check():
                        self._found.append(stored.group)
                        break
                    reads, size = reads + 1, size + length
                    if reads >= READS or size >= READ_BYTES:
                        reads = size = 0
                        if self._stopped.wait(PAUSE_S):
                            return
        finally:
            self._stored.clear()
            for file in self._files.values():
                os.close(file)

    def _checks(self, stored: Stored) -> Iterator[tuple[Callable[[], bool], int]]:
        """(whether it can be read, how many bytes) of all that a group has below the position."""
        position, length = stored.prompt
        if position < self.below:
            yield partial(self._has_record, position, length), length
        for sample in stored.samples:
            for place in sample.places:
                if place.record < self.below:
                    yield partial(self._has_payload, place), place.size

    def _has_record(self, position: int, length: int) -> bool:
        return records.decode(self._read(position, 0, length)) is not None

    def _has_payload(self, place: Place) -> bool:
        payload = self._read(place.record, place.offset, place.size)
        return len(payload) == place.size and crc32(payload) == place.checksum

    def _read(self, record: int, offset: int, size: int) -> bytes:
        """Nothing where the disk gives nothing; a file that was reclaimed meanwhile had nothing that anybody needs."""
        start = self._starts[bisect_right(self._starts, record) - 1]
        try:
            if start not in self._files:
                self._files[start] = os.open(self.folder / f"{start:020d}{SUFFIX}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[start], size, record - start + offset)
        except OSError:
            return b""


def groups_at(ledger: Ledger, damaged: Damaged) -> list[Group]:
    """Those that need the bytes that could not be read."""
    record, offset = damaged.record, damaged.offset
    return [
        group
        for group in ledger.groups.values()
        if group.prompt[0] == record
        or any(place[:2] == (record, offset) for line in group.lines for place in line.places)
    ]
