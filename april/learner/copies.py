"""Copies of a checkpoint's files that must exist before it counts as durable: on the next disk, or in an object
store."""

import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from april.files.objects import StoreRefused
from april.formats.stored import StoredCheckpoints, Sums, refused
from april.learner.checkpoint import begin_folder
from april.learner.disks import Disks
from april.learner.holdings import FoundCheckpoint, RankInventory, missing_files

log = logging.getLogger(__name__)

WRITER = re.compile(r"__(\d+)_.*")
"""Names of checkpoint files that a rank wrote, with the rank."""


class CheckpointCopies(Protocol):
    """A mechanism for copies of checkpoints. Every method except `export` is collective."""

    on_disks: int
    """Number of disks that each file is on, if there are that many disks."""

    @property
    def retries(self) -> int | None:
        """Retried calls of this rank into the object store; None without a store."""

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        """Copy a checkpoint that has just been written; returns once all copies exist. `written` lists the files of
        each rank; `folder` has the files of `sums`, without the checksum list itself."""

    def steps(self) -> set[int]:
        """Steps of the checkpoints that can be restored from copies alone."""

    def fetch_missing(
        self, step: int, folder: Path, own: RankInventory | None, inventories: Sequence[RankInventory | None]
    ) -> RankInventory | None:
        """Fetch files that no disk has but the copies do; returns this rank's inventory after that. `own` is this
        rank's inventory, `inventories` has those of all ranks."""

    def repair(self, found: FoundCheckpoint, folder: Path) -> None:
        """Make missing copies of a checkpoint that the disks hold completely."""

    def set_aside(self, step: int) -> None:
        """Quarantine the copies of step `step`, so that they count as no checkpoint."""

    def prune(self, keep: int, besides: Collection[int]) -> None:
        """Remove the copies of all checkpoints but the newest `keep` and those of the steps `besides`."""

    def export(self, folder: Path) -> None:
        """Copy an exported model folder. Not collective: one rank calls it."""


class NeighbourDiskCopies:
    """Copies each file to the next disk, if there is one: any single disk may be lost."""

    on_disks = 2
    retries = None

    def __init__(self, disks: Disks):
        self.disks = disks

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        self.disks.transfer(self.disks.neighbour_copies(written), folder, sums)

    def steps(self) -> set[int]:
        return set()

    def fetch_missing(
        self, step: int, folder: Path, own: RankInventory | None, inventories: Sequence[RankInventory | None]
    ) -> RankInventory | None:
        return own

    def repair(self, found: FoundCheckpoint, folder: Path) -> None: ...

    def set_aside(self, step: int) -> None: ...

    def prune(self, keep: int, besides: Collection[int]) -> None: ...

    def export(self, folder: Path) -> None: ...


class ObjectStoreCopies:
    """Copies in an object store, where every rank uploads its files: all disks may be lost. Files that the disks still
    have are not fetched."""

    on_disks = 1

    def __init__(self, stored: StoredCheckpoints, disks: Disks):
        """Raises ConfigError if a machine cannot use the object store."""
        self.stored, self.disks = stored, disks
        try:
            if disks.is_leader:
                stored.objects.probe()
        except StoreRefused as error:
            raise refused(error) from None
        if disks.rank == 0:
            log.info("checkpoints are copied to %s before they count as durable", stored.url)

    @property
    def retries(self) -> int:
        return self.stored.objects.retries

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        unowned = sums.keys() - {name for names in written for name in names} if self.disks.rank == 0 else set()
        self._put(step, folder, [*written[self.disks.rank], *sorted(unowned)], sums)

    def _put(self, step: int, folder: Path, names: Sequence[str], sums: Sums) -> None:
        """Upload the files of this rank, and the checksum list once all ranks have uploaded theirs. Collective."""
        for name in names:
            self.stored.put(step, sums, folder / name)
        self.disks.barrier()
        if self.disks.rank == 0:
            self.stored.complete(step, sums)
        self.disks.barrier()

    def steps(self) -> set[int]:
        return self.disks.all_gather(self.stored.steps() if self.disks.rank == 0 else set())[0]

    def fetch_missing(
        self, step: int, folder: Path, own: RankInventory | None, inventories: Sequence[RankInventory | None]
    ) -> RankInventory | None:
        checksum_lists = self.disks.all_gather(self.stored.checkpoint_sums(step) if self.disks.rank == 0 else [])[0]
        on_disk = [
            sums for sums in checksum_lists if any(inventory and inventory.sums == sums for inventory in inventories)
        ]
        return (
            self._fetch_missing(step, folder, own, inventories, [*on_disk, *checksum_lists][0])
            if checksum_lists
            else own
        )

    def _fetch_missing(
        self,
        step: int,
        folder: Path,
        own: RankInventory | None,
        inventories: Sequence[RankInventory | None],
        sums: Sums,
    ) -> RankInventory:
        if own is None or own.sums != sums:
            own = RankInventory(sums, ())
            if self.disks.is_leader:
                begin_folder(folder, sums)
        self.disks.barrier()
        ranks = len(inventories)
        share = [name for name in missing_files(sums, inventories) if writer_of(name) % ranks == self.disks.rank]
        fetched = [name for name in share if self.stored.fetch(step, sums, name, folder / name)]
        fetched_by_rank = self.disks.all_gather(fetched)
        on_own_disk = {name for rank in self.disks.ranks(self.disks.own) for name in fetched_by_rank[rank]}
        return RankInventory(sums, {*own.whole, *fetched}, [name for name in own.damaged if name not in on_own_disk])

    def repair(self, found: FoundCheckpoint, folder: Path) -> None:
        checksum_lists = self.disks.all_gather(self.stored.checkpoint_sums(found.step) if self.disks.rank == 0 else [])[
            0
        ]
        if found.sums not in checksum_lists:
            share = [name for name, disks in sorted(found.disks.items()) if disks[0] == self.disks.own]
            self._put(found.step, folder, self.disks.share(share), found.sums)

    def set_aside(self, step: int) -> None:
        if self.disks.rank == 0:
            for url in self.stored.set_aside(step, "damaged"):
                log.error("checkpoint %s is damaged, and set aside", url, extra={"step": step})
        self.disks.barrier()

    def prune(self, keep: int, besides: Collection[int]) -> None:
        if self.disks.rank == 0:
            self.stored.prune(keep, besides)

    def export(self, folder: Path) -> None:
        self.stored.export(folder)


def writer_of(name: str) -> int:
    """Rank that wrote a checkpoint file, numbered as when it was written; 0 for files of no single rank."""
    found = WRITER.fullmatch(name)
    return int(found[1]) if found else 0
