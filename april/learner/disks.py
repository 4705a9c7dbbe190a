"""Disks of a learner: which ranks share one, and file transfers between the disks of different ranks.

Ranks on one machine share a disk. Ranks on several machines do if the checkpoint folder is on a common file system.
"""

import hashlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from april.files.disk import sync
from april.learner.holdings import FileTransfer, order_transfers

CHUNK_BYTES = 2**24

Value = TypeVar("Value")


class Disks:
    """The disks on which the ranks see `directory`, numbered in the order of their lowest ranks."""

    def __init__(self, directory: Path, group: dist.ProcessGroup):
        """`group` is a gloo group over all ranks. Collective."""
        self.directory, self.group, self.rank = directory, group, dist.get_rank()
        lowest = self._lowest_ranks() if dist.get_world_size() > 1 else [0]
        self.leaders = sorted(set(lowest))
        """Lowest rank of each disk."""
        self.disk_of_rank = [self.leaders.index(rank) for rank in lowest]

    def _lowest_ranks(self) -> list[int]:
        """For each rank the lowest rank that sees the same folder, found by marker folders in it. Collective."""
        name = f"{self.all_gather(uuid.uuid4().hex)[0]}_{{}}.partial"
        own = self.directory / name.format(self.rank)
        own.mkdir(parents=True)
        dist.barrier(self.group)
        seen = (rank for rank in range(self.rank) if (self.directory / name.format(rank)).is_dir())
        lowest = self.all_gather(next(seen, self.rank))
        own.rmdir()
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
        """This rank's share of work on the files `names` of its disk."""
        ranks = self.ranks(self.own)
        return names[ranks.index(self.rank) :: len(ranks)]

    def all_gather(self, own: Value) -> list[Value]:
        """The value `own` of each rank, by rank. Collective."""
        values: list[Value | None] = [None] * dist.get_world_size()
        dist.all_gather_object(values, own, self.group)
        return values  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier(self.group)

    def neighbour_copies(self, names: Sequence[Sequence[str]]) -> list[FileTransfer]:
        """Transfers between ranks that copy the files each rank has written to the next disk, if there is one."""
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

    def assign_ranks(self, moves: Sequence[FileTransfer]) -> list[FileTransfer]:
        """Transfers between disks, distributed over the disks' ranks."""
        assigned = []
        for index, move in enumerate(moves):
            sources, targets = self.ranks(move.source), self.ranks(move.target)
            assigned.append(FileTransfer(move.name, sources[index % len(sources)], targets[index % len(targets)]))
        return assigned

    def transfer(self, moves: Sequence[FileTransfer], folder: Path, sums: Mapping[str, str]) -> None:
        """Copy files of `folder` from rank to rank and sync them to disk. Raises OSError if a received file does not
        match its checksum in `sums`. Collective."""
        for move in order_transfers(moves):
            if self.rank == move.source:
                self._send(folder / move.name, move.target)
            elif self.rank == move.target:
                self._receive(folder / move.name, move.source, sums[move.name])
        self.barrier()

    def _send(self, path: Path, rank: int) -> None:
        size = path.stat().st_size
        dist.send(torch.tensor(size), rank, self.group)
        chunk = torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8)
        with path.open("rb") as file:
            for begin in range(0, size, CHUNK_BYTES):
                part = chunk[: size - begin]
                file.readinto(part.numpy())
                dist.send(part, rank, self.group)

    def _receive(self, path: Path, rank: int, digest: str) -> None:
        announced = torch.tensor(0)
        dist.recv(announced, rank, self.group)
        size, found = int(announced), hashlib.sha256()
        chunk = torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            for begin in range(0, size, CHUNK_BYTES):
                part = chunk[: size - begin]
                dist.recv(part, rank, self.group)
                file.write(part.numpy())
                found.update(part.numpy())
            file.flush()
            os.fsync(file.fileno())
        if found.hexdigest() != digest:
            raise OSError(f"{path} of rank {rank} has not arrived as it was written; a disk or a link damages files")
        partial.rename(path)
        sync(path.parent)
