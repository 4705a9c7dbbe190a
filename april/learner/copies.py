"""Where a checkpoint's files have to lie, beside the disks that they are written on, before `durable` is said: each on
the next disk, or all in an object store."""

import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from april.files.objects import StoreRefused
from april.formats.stored import StoredCheckpoints, Sums, refused
from april.learner.checkpoint import begin_folder
from april.learner.disks import Disks
from april.learner.holdings import Found, Held, nowhere

log = logging.getLogger(__name__)

WRITER = re.compile(r"__(\d+)_.*")
"""of the rank that wrote a file"""


class Copies(Protocol):
    """Every method but `export` is collective."""

    on_disks: int
    """disks that each file is on, if there are so many"""

    @property
    def retries(self) -> int | None:
        """Calls of this rank into a store, if there is one, that were tried again."""

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        """Make those of a checkpoint that has just been written; all are there then. `written`: files by rank; `folder`
        has `sums` but for their list."""

    def steps(self) -> set[int]:
        """Of the checkpoints that can be put together from copies alone."""

    def bring(self, step: int, folder: Path, own: Held | None, held: Sequence[Held | None]) -> Held | None:
        """Have the disks hold what none of them does and the copies do; what this rank holds then. `held`: by rank."""

    def mend(self, found: Found, folder: Path) -> None:
        """Make those that are lacking of a checkpoint that the disks hold together."""

    def set_aside(self, step: int) -> None:
        """Let copies of that step be of no checkpoint any more."""

    def prune(self, keep: int, besides: Collection[int]) -> None:
        """Remove all but those of the newest `keep` checkpoints and of those `besides`."""

    def export(self, folder: Path) -> None:
        """Copy an exported folder, too. One rank alone."""


class OnNextDisk:
    """Each file goes to the next disk, if there is one: any one of them may be lost."""

    on_disks = 2
    retries = None

    def __init__(self, disks: Disks):
        self.disks = disks

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        self.disks.carry(self.disks.copies(written), folder, sums)

    def steps(self) -> set[int]:
        return set()

    def bring(self, step: int, folder: Path, own: Held | None, held: Sequence[Held | None]) -> Held | None:
        return own

    def mend(self, found: Found, folder: Path) -> None: ...

    def set_aside(self, step: int) -> None: ...

    def prune(self, keep: int, besides: Collection[int]) -> None: ...

    def export(self, folder: Path) -> None: ...


class InStore:
    """Every rank puts its files there; all disks may be lost. What they still hold is not fetched."""

    on_disks = 1

    def __init__(self, stored: StoredCheckpoints, disks: Disks):
        """Raises ConfigError where one of the disks' machines has no use of the store."""
        self.stored, self.disks = stored, disks
        try:
            if disks.leads:
                stored.objects.probe()
        except StoreRefused as error:
            raise refused(error) from None
        if disks.rank == 0:
            log.info("checkpoints lie in %s, too, before the broker hears of them", stored.url)

    @property
    def retries(self) -> int:
        return self.stored.objects.retries

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        others = sums.keys() - {name for names in written for name in names} if self.disks.rank == 0 else set()
        self._put(step, folder, [*written[self.disks.rank], *sorted(others)], sums)

    def _put(self, step: int, folder: Path, names: Sequence[str], sums: Sums) -> None:
        """The files of this rank, and when all ranks have put theirs, the list. Collective."""
        for name in names:
            self.stored.put(step, sums, folder / name)
        self.disks.meet()
        if self.disks.rank == 0:
            self.stored.complete(step, sums)
        self.disks.meet()

    def steps(self) -> set[int]:
        return self.disks.told(self.stored.steps() if self.disks.rank == 0 else set())[0]

    def bring(self, step: int, folder: Path, own: Held | None, held: Sequence[Held | None]) -> Held | None:
        writings = self.disks.told(self.stored.writings(step) if self.disks.rank == 0 else [])[0]
        on_disk = [sums for sums in writings if any(one and one.sums == sums for one in held)]
        return self._bring(step, folder, own, held, [*on_disk, *writings][0]) if writings else own

    def _bring(self, step: int, folder: Path, own: Held | None, held: Sequence[Held | None], sums: Sums) -> Held:
        if own is None or own.sums != sums:
            own = Held(sums, ())
            if self.disks.leads:
                begin_folder(folder, sums)
        self.disks.meet()
        ranks = len(held)
        share = [name for name in nowhere(sums, held) if writer_of(name) % ranks == self.disks.rank]
        came = [name for name in share if self.stored.fetch(step, sums, name, folder / name)]
        told = self.disks.told(came)
        here = {name for rank in self.disks.ranks(self.disks.own) for name in told[rank]}
        return Held(sums, {*own.whole, *came}, [name for name in own.damaged if name not in here])

    def mend(self, found: Found, folder: Path) -> None:
        writings = self.disks.told(self.stored.writings(found.step) if self.disks.rank == 0 else [])[0]
        if found.sums not in writings:
            share = [name for name, disks in sorted(found.disks.items()) if disks[0] == self.disks.own]
            self._put(found.step, folder, self.disks.share(share), found.sums)

    def set_aside(self, step: int) -> None:
        if self.disks.rank == 0:
            for place in self.stored.set_aside(step, "damaged"):
                log.error("checkpoint %s is damaged, and set aside", place, extra={"step": step})
        self.disks.meet()

    def prune(self, keep: int, besides: Collection[int]) -> None:
        if self.disks.rank == 0:
            self.stored.prune(keep, besides)

    def export(self, folder: Path) -> None:
        self.stored.export(folder)


def writer_of(name: str) -> int:
    """The rank, in the ranks of then, that wrote a file; 0 of one that is nobody's own."""
    found = WRITER.fullmatch(name)
    return int(found[1]) if found else 0
