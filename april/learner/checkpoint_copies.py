"""Copies of a checkpoint's files that must exist before it counts as durable: on the next disk, or in an object
store."""

import contextlib
import hashlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from april.config.stored import StoredCheckpoints, Sums, store_refused
from april.learner.checkpoint import begin_folder
from april.learner.process_group import Value, all_gather_values
from april.util.files import retried, sync
from april.util.objects import StoreRefused

log = logging.getLogger(__name__)

# --- inventories and transfers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankInventory:
    """One rank's inventory of a checkpoint on its disk: the result of verifying its share of the files."""

    sums: Mapping[str, str]
    """The checksum list found on this disk: SHA-256 by file name for every file of the checkpoint, including files on
    other disks."""
    whole: Collection[str]
    """Names of files in this rank's share that exist and match their checksum."""
    damaged: Collection[str] = ()
    """Names of files in this rank's share that exist and do not match their checksum."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint: each file is on at least one disk."""

    step: int
    """Policy step of the checkpoint's weights."""
    sums: Mapping[str, str]
    """SHA-256 of each of the checkpoint's files, by file name."""
    disks: Mapping[str, Sequence[int]]
    """Numbers of the disks that have each file, by file name."""
    listed: Collection[int]
    """Numbers of the disks that have the checkpoint's checksum list."""


@dataclass(frozen=True)
class FileTransfer:
    """Copy of the file `name` from disk or rank `source` to disk or rank `target`."""

    name: str
    source: int
    target: int


def find_checkpoint(
    step: int, inventories: Sequence[RankInventory | None], disk_of_rank: Sequence[int]
) -> FoundCheckpoint | None:
    """The complete checkpoint of `step` on the ranks' disks; None if a file is missing. `inventories`: that of each
    rank, None if it has no folder of this step; `disk_of_rank`: number of the disk of each rank. Files under different
    checksum lists come from different writes and are never combined."""
    lists = [dict(inventory.sums) for inventory in inventories if inventory]
    for sums in lists:
        same = [
            (disk, inventory)
            for disk, inventory in zip(disk_of_rank, inventories, strict=True)
            if inventory and inventory.sums == sums
        ]
        disks = {name: sorted({disk for disk, inventory in same if name in inventory.whole}) for name in sums}
        if sums and all(disks.values()):
            return FoundCheckpoint(step, sums, disks, {disk for disk, _ in same})
    return None


def missing_files(sums: Mapping[str, str], inventories: Sequence[RankInventory | None]) -> list[str]:
    """Names, sorted, of the files in the checksum list `sums` that no disk has intact. `inventories`: that of each
    rank, None if it has no folder of the checkpoint."""
    whole = set[str]().union(*(inventory.whole for inventory in inventories if inventory and inventory.sums == sums))
    return sorted(sums.keys() - whole)


def plan_transfers(
    disks: Mapping[str, Sequence[int]], needed: Sequence[Collection[str]], copies: int = 2
) -> list[FileTransfer]:
    """Transfers after which each disk has the files it needs, and each file is on `copies` disks (1 or 2) if there are
    that many.

    `disks` has the disks that hold each file, by name; `needed` the names of the files that each disk needs.
    """
    moves = []
    for name, holders in sorted(disks.items()):
        targets = [disk for disk, names in enumerate(needed) if name in names and disk not in holders]
        if len(needed) > 1 and len(holders) + len(targets) < copies:
            targets.append((holders[0] + 1) % len(needed))
        moves += [FileTransfer(name, holders[i % len(holders)], target) for i, target in enumerate(targets)]
    return moves


def order_transfers(moves: Sequence[FileTransfer]) -> list[FileTransfer]:
    """The transfers in an order that runs in rounds: a rank takes part in at most one transfer of a round, so that few
    ranks wait for each other."""
    remaining, ordered = list(moves), list[FileTransfer]()
    while remaining:
        busy, later = set[int](), list[FileTransfer]()
        for move in remaining:
            if busy & {move.source, move.target}:
                later.append(move)
            else:
                busy |= {move.source, move.target}
                ordered.append(move)
        remaining = later
    return ordered


# --- disks ------------------------------------------------------------------------------------------------------------

CHUNK_BYTES = 2**24


class Disks:
    """The disks that the ranks of a group write to. Ranks are on the same disk if they see the same folder under the
    path `directory`. Disks are numbered from 0, in the order of their lowest ranks."""

    def __init__(self, directory: Path, group: dist.ProcessGroup):
        """`directory`: folder of checkpoints or exports, created if it does not exist; `group`: gloo group over all
        ranks. Collective."""
        self.directory, self.group, self.rank = directory, group, dist.get_rank()
        lowest = self._lowest_ranks() if dist.get_world_size() > 1 else [0]
        self.leaders = sorted(set(lowest))
        """Lowest rank of each disk, by the number of the disk."""
        self.disk_of_rank = [self.leaders.index(rank) for rank in lowest]

    def _lowest_ranks(self) -> list[int]:
        """For each rank the lowest rank that sees the same `directory`, found by a folder that each rank creates in it.
        Collective."""
        name = f"{self.all_gather(uuid.uuid4().hex, str)[0]}_{{}}.partial"
        own = self.directory / name.format(self.rank)
        retried(lambda: own.mkdir(parents=True, exist_ok=True))
        dist.barrier(self.group)
        seen = (rank for rank in range(self.rank) if retried((self.directory / name.format(rank)).is_dir))
        lowest = self.all_gather(next(seen, self.rank), int)
        retried(own.rmdir)
        return lowest

    @property
    def own(self) -> int:
        return self.disk_of_rank[self.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work that is done once per disk."""
        return self.rank in self.leaders

    @property
    def count(self) -> int:
        return len(self.leaders)

    def ranks(self, disk: int) -> list[int]:
        return [rank for rank, its in enumerate(self.disk_of_rank) if its == disk]

    def share(self, names: Sequence[str]) -> Sequence[str]:
        """The part of `names`, files on the disk of this rank, that this rank and no other rank of the disk
        processes."""
        ranks = self.ranks(self.own)
        return names[ranks.index(self.rank) :: len(ranks)]

    def all_gather(self, own: Value, form: Any) -> list[Value]:
        """The value `own` of each rank, by rank, as `april.learner.process_group.all_gather_values`; `form`: type of
        the values. Collective."""
        return all_gather_values(own, form, self.group)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier(self.group)

    def neighbour_copies(self, names: Sequence[Sequence[str]]) -> list[FileTransfer]:
        """Transfers between ranks that copy the files of each rank to the next disk, so that every file is on two
        disks; none if there is one disk only. `names`: for each rank the files that it has written."""
        moves = []
        for rank, written in enumerate(names):
            disk = self.disk_of_rank[rank]
            targets = self.ranks((disk + 1) % self.count)
            target = targets[self.ranks(disk).index(rank) % len(targets)]
            moves += [FileTransfer(name, rank, target) for name in written if self.count > 1]
        return moves

    def from_rank_0(self, name: str) -> list[FileTransfer]:
        """Transfers between ranks that copy a file of rank 0 to every other disk."""
        return [FileTransfer(name, 0, leader) for leader in self.leaders[1:]]

    def to_first_disk(self, names: Sequence[Sequence[str]]) -> list[FileTransfer]:
        """Transfers between ranks that copy to the disk of rank 0 the files that ranks have written on other disks.
        `names`: for each rank the files that it has written."""
        away = [rank for rank, disk in enumerate(self.disk_of_rank) if disk]
        targets = self.ranks(0)
        return [FileTransfer(name, rank, targets[rank % len(targets)]) for rank in away for name in names[rank]]

    def assign_ranks(self, moves: Sequence[FileTransfer]) -> list[FileTransfer]:
        """Transfers from rank to rank that do the same as `moves`, transfers from disk to disk: each is given to a rank
        of its source disk and one of its target disk, in turn."""
        assigned = []
        for index, move in enumerate(moves):
            sources, targets = self.ranks(move.source), self.ranks(move.target)
            assigned.append(FileTransfer(move.name, sources[index % len(sources)], targets[index % len(targets)]))
        return assigned

    def transfer(self, moves: Sequence[FileTransfer], folder: Path, sums: Mapping[str, str]) -> None:
        """Copy files of `folder` from rank to rank and sync them to disk. Raises OSError on every rank if one of them
        cannot read or write its file, or receives one that does not match its checksum in `sums`. Collective."""
        failures = list[str]()
        for move in order_transfers(moves):
            path = folder / move.name
            if self.rank == move.source:
                failures += self._send(path, move.target)
            elif self.rank == move.target:
                failures += self._receive(path, move.source, sums[move.name])
        for rank, its in enumerate(self.all_gather(failures, list[str])):
            if its:
                raise OSError(f"rank {rank} cannot copy {its[0]}; free or mend its disk")

    def _send(self, path: Path, rank: int) -> list[str]:
        """Send a file to a rank. If reading fails, the rank still gets as many bytes as were announced, so that it does
        not wait for ever. Returns what has failed, in words; empty if nothing has."""
        with FileCopy(path, "rb") as copy:
            size = copy.attempt(lambda: os.fstat(copy.file.fileno()).st_size) or 0
            dist.send(torch.tensor(size), rank, self.group)
            chunk = torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8)
            for begin in range(0, size, CHUNK_BYTES):
                part = chunk[: size - begin]
                copy.attempt(copy.file.readinto, part.numpy())
                dist.send(part, rank, self.group)
        return copy.failures

    def _receive(self, path: Path, rank: int, digest: str) -> list[str]:
        """Receive a file, whose SHA-256 is `digest`, from a rank. If writing fails, all bytes are still received, so
        that the sender does not wait for ever. Returns what has failed, in words; empty if nothing has."""
        announced = torch.tensor(0)
        dist.recv(announced, rank, self.group)
        size, found = int(announced), hashlib.sha256()
        chunk = torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8)
        partial = path.with_name(f"{path.name}.partial")
        with FileCopy(partial, "wb") as copy:
            for begin in range(0, size, CHUNK_BYTES):
                part = chunk[: size - begin]
                dist.recv(part, rank, self.group)
                copy.attempt(lambda part=part: copy.file.write(part.numpy()))
                found.update(part.numpy())
            copy.attempt(lambda: copy.file.flush())
            copy.attempt(lambda: os.fsync(copy.file.fileno()))
        if found.hexdigest() != digest:
            copy.failures.append(
                f"{path}: it has not arrived from rank {rank} as it was written, a disk or a link damages files"
            )
        copy.attempt(retried, partial.rename, path)
        copy.attempt(retried, sync, path.parent)
        return copy.failures


class FileCopy:
    """An open file that is being copied. A failure is recorded and not raised, so that this rank can finish the
    transfers that other ranks wait for; after it nothing more is done with the file."""

    def __init__(self, path: Path, mode: str):
        self.path = path
        self.failures: list[str] = []
        """The file and the reason of what has failed; empty if nothing has."""
        self.file: Any = self.attempt(retried, path.open, mode)

    def attempt(self, call: Callable[..., Value], *arguments: Any) -> Value | None:
        """The result of the call; None if it fails with OSError, or if something has failed before."""
        if self.failures:
            return None
        try:
            return call(*arguments)
        except OSError as error:
            self.failures.append(f"{self.path}: {error}")
            return None

    def __enter__(self) -> "FileCopy":
        return self

    def __exit__(self, *error: object) -> None:
        if self.file:
            with contextlib.suppress(OSError):  # of what could not be written, which is known by then
                self.file.close()


# --- copies -----------------------------------------------------------------------------------------------------------

WRITER = re.compile(r"__(\d+)_.*")
"""Regular expression for the name of a checkpoint file that a single rank wrote; group 1 is the rank."""


class CheckpointCopies:
    """Base class of the ways to keep copies of checkpoints; its methods do nothing. Every method except `export` is
    collective."""

    on_disks = 1
    """Number of disks on which each file is kept, if there are that many disks."""

    def __init__(self, disks: Disks):
        self.disks = disks

    @property
    def retries(self) -> int | None:
        """Number of this rank's object-store calls that were retried so far; None without an object store."""
        return None

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        """Copy a checkpoint that has just been written; returns once all copies exist. `written` lists the files of
        each rank; `folder` has the files of `sums`, without the checksum list itself."""

    def steps(self) -> set[int]:
        """Policy steps of the checkpoints that can be restored from copies alone."""
        return set()

    def fetch_missing(
        self, step: int, folder: Path, own: RankInventory | None, inventories: Sequence[RankInventory | None]
    ) -> RankInventory | None:
        """Fetch into `folder`, from the copies of the checkpoint `step`, the files that no disk has; returns this
        rank's updated inventory. `own`: this rank's inventory, `inventories`: those of all ranks; None for a rank
        without a folder of this step."""
        return own

    def repair(self, found: FoundCheckpoint, folder: Path) -> None:
        """Make missing copies of a checkpoint that the disks hold completely."""

    def set_aside(self, step: int) -> None:
        """Quarantine the copies of step `step`, so that they count as no checkpoint."""

    def prune(self, keep: int, besides: Collection[int]) -> None:
        """Remove the copies of all checkpoints but the newest `keep` and those of the steps `besides`."""

    def export(self, folder: Path) -> None:
        """Copy an exported model folder. Rank 0 writes; other ranks do not wait."""


class NeighbourDiskCopies(CheckpointCopies):
    """Copies each file to the next disk, if there is one: any single disk may be lost."""

    on_disks = 2

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        self.disks.transfer(self.disks.neighbour_copies(written), folder, sums)


class ObjectStoreCopies(CheckpointCopies):
    """Copies in an object store, where every rank uploads its files: all disks may be lost. Files that the disks still
    have are not fetched."""

    def __init__(self, stored: StoredCheckpoints, disks: Disks):
        """Check the object store from every machine. Raises ConfigError if a machine cannot use the store."""
        super().__init__(disks)
        self.stored = stored
        try:
            if disks.is_leader:
                stored.objects.probe()
        except StoreRefused as error:
            raise store_refused(error) from None
        if disks.rank == 0:
            log.info("checkpoints are copied to %s before they count as durable", stored.url)

    @property
    def retries(self) -> int:
        return self.stored.objects.retries

    def add(self, step: int, folder: Path, written: Sequence[Sequence[str]], sums: Sums) -> None:
        unowned = sums.keys() - {name for names in written for name in names} if self.disks.rank == 0 else set()
        self._put(step, folder, [*written[self.disks.rank], *sorted(unowned)], sums)

    def _put(self, step: int, folder: Path, names: Sequence[str], sums: Sums) -> None:
        """Upload the files `names` of this rank from `folder`, and once all ranks have done so the checksum list `sums`
        of the whole checkpoint. Collective."""
        for name in names:
            self.stored.put(step, sums, folder / name)
        self.disks.barrier()
        if self.disks.rank == 0:
            self.stored.complete(step, sums)
        self.disks.barrier()

    def steps(self) -> set[int]:
        return self.disks.all_gather(self.stored.steps() if self.disks.rank == 0 else set(), set[int])[0]

    def _checksum_lists(self, step: int) -> list[Sums]:
        """Checksum lists of the uploads of `step`, as rank 0 finds them in the store. Collective."""
        sums = self.stored.checkpoint_sums(step) if self.disks.rank == 0 else []
        return self.disks.all_gather(sums, list[dict[str, str]])[0]

    def fetch_missing(
        self, step: int, folder: Path, own: RankInventory | None, inventories: Sequence[RankInventory | None]
    ) -> RankInventory | None:
        checksum_lists = self._checksum_lists(step)
        if not checksum_lists:
            return own
        on_disks = [inventory.sums for inventory in inventories if inventory]
        sums = next((sums for sums in checksum_lists if sums in on_disks), checksum_lists[0])
        if own is None or own.sums != sums:
            own = RankInventory(sums, ())
            if self.disks.is_leader:
                begin_folder(folder, sums)
        self.disks.barrier()
        ranks = len(inventories)
        share = [name for name in missing_files(sums, inventories) if writer_of(name) % ranks == self.disks.rank]
        fetched = [name for name in share if self.stored.fetch(step, sums, name, folder / name)]
        fetched_by_rank = self.disks.all_gather(fetched, list[str])
        on_own_disk = {name for rank in self.disks.ranks(self.disks.own) for name in fetched_by_rank[rank]}
        return RankInventory(sums, {*own.whole, *fetched}, [name for name in own.damaged if name not in on_own_disk])

    def repair(self, found: FoundCheckpoint, folder: Path) -> None:
        if found.sums not in self._checksum_lists(found.step):
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
        if self.disks.rank == 0:
            self.stored.export(folder)


def writer_of(name: str) -> int:
    """Rank that wrote a checkpoint file, numbered as when it was written; 0 for files of no single rank."""
    found = WRITER.fullmatch(name)
    return int(found[1]) if found else 0
