"""Inventory of one checkpoint over the disks of a learner, and the file transfers it needs.

Pure functions: nothing here reads a file or communicates with another rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInventory:
    """One rank's inventory of a checkpoint on its disk: the result of verifying its share of the files."""

    sums: Mapping[str, str]
    """Checksum list on the disk: SHA-256 of every file of the checkpoint, on whichever disk, by name."""
    whole: Collection[str]
    """Verified files that exist and match their checksum."""
    damaged: Collection[str] = ()
    """Verified files that exist and do not match their checksum."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint: each file is on at least one disk."""

    step: int
    """Policy step of its weights."""
    sums: Mapping[str, str]
    """Checksums of its files by name."""
    disks: Mapping[str, Sequence[int]]
    """Disks that have a file, by its name."""
    listed: Collection[int]
    """Disks that have its checksum list."""


@dataclass(frozen=True)
class FileTransfer:
    """Copy of the file `name` from disk or rank `source` to disk or rank `target`."""

    name: str
    source: int
    target: int


def find_checkpoint(
    step: int, inventories: Sequence[RankInventory | None], disk_of_rank: Sequence[int]
) -> FoundCheckpoint | None:
    """The complete checkpoint of `step` on the ranks' disks, by the inventory and the disk of each rank; None without
    one. Files under different checksum lists come from different writes and are never combined."""
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
    """Files of the checksum list `sums` that no disk has intact."""
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
    """Transfers in rounds in which each rank takes part once, so that ranks wait for each other as little as
    possible."""
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
