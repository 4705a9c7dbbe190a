"""Which ranks of a learner see one disk, and files that go from the disk of one to that of another.

Ranks of one machine share theirs. Those of several do where the checkpoints' folder lies on a common file system.
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
from april.learner.holdings import Move, in_rounds

CHUNK_BYTES = 2**24

Told = TypeVar("Told")


class Disks:
    """Those on which the ranks see `directory`; numbered by their lowest ranks."""

    def __init__(self, directory: Path, group: dist.ProcessGroup):
        """`group`: gloo, over all ranks. Collective."""
        self.directory, self.group, self.rank = directory, group, dist.get_rank()
        lowest = self._lowest_ranks() if dist.get_world_size() > 1 else [0]
        self.leaders = sorted(set(lowest))
        """the lowest rank of each disk"""
        self.of_rank = [self.leaders.index(rank) for rank in lowest]

    def _lowest_ranks(self) -> list[int]:
        """The lowest rank that sees the folder of each rank, found by marks in it."""
        name = f"{self.told(uuid.uuid4().hex)[0]}_{{}}.partial"
        own = self.directory / name.format(self.rank)
        own.mkdir(parents=True)
        dist.barrier(self.group)
        seen = (rank for rank in range(self.rank) if (self.directory / name.format(rank)).is_dir())
        lowest = self.told(next(seen, self.rank))
        own.rmdir()
        return lowest

    @property
    def own(self) -> int:
        return self.of_rank[self.rank]

    @property
    def leads(self) -> bool:
        """This rank does what is done once on its disk."""
        return self.rank in self.leaders

    @property
    def count(self) -> int:
        return len(self.leaders)

    def ranks(self, disk: int) -> list[int]:
        return [rank for rank, its in enumerate(self.of_rank) if its == disk]

    def share(self, names: Sequence[str]) -> Sequence[str]:
        """Of work on files of this disk, what is this rank's."""
        ranks = self.ranks(self.own)
        return names[ranks.index(self.rank) :: len(ranks)]

    def told(self, own: Told) -> list[Told]:
        """What each rank says. Collective."""
        said: list[Told | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, own, self.group)
        return said  # type: ignore[return-value]

    def meet(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier(self.group)

    def copies(self, names: Sequence[Sequence[str]]) -> list[Move]:
        """Between ranks: the files that each has written go to the disk after its own, if there is one."""
        moves = []
        for rank, written in enumerate(names):
            disk = self.of_rank[rank]
            targets = self.ranks((disk + 1) % self.count)
            target = targets[self.ranks(disk).index(rank) % len(targets)]
            moves += [Move(name, rank, target) for name in written if self.count > 1]
        return moves

    def from_first(self, name: str) -> list[Move]:
        """Between ranks: a file of rank 0's goes to every other disk."""
        return [Move(name, 0, leader) for leader in self.leaders[1:]]

    def between_ranks(self, moves: Sequence[Move]) -> list[Move]:
        """Moves between disks, shared out among their ranks."""
        shared = []
        for place, move in enumerate(moves):
            sources, targets = self.ranks(move.source), self.ranks(move.target)
            shared.append(Move(move.name, sources[place % len(sources)], targets[place % len(targets)]))
        return shared

    def carry(self, moves: Sequence[Move], folder: Path, sums: Mapping[str, str]) -> None:
        """Copy files of `folder` from rank to rank; they are on disk then. Raises OSError where one does not arrive as
        `sums` says it is. Collective."""
        for move in in_rounds(moves):
            if self.rank == move.source:
                self._send(folder / move.name, move.target)
            elif self.rank == move.target:
                self._receive(folder / move.name, move.source, sums[move.name])
        self.meet()

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
