"""What the disks of a learner hold of one checkpoint, together, and which files have to go from one to another.

Nothing here reads a file or asks another rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """What one rank has seen of a checkpoint on its disk."""

    sums: Mapping[str, str]
    """the list that lies there: digests of all files of the checkpoint, on whatever disk, by name"""
    whole: Collection[str]
    """those that are there and have their digest, of the ones that this rank has looked at"""
    damaged: Collection[str] = ()
    """those that are there and have another"""


@dataclass(frozen=True)
class Found:
    """A checkpoint that the disks hold whole, each file on one of them at least."""

    step: int
    sums: Mapping[str, str]
    disks: Mapping[str, Sequence[int]]
    """by name of the file: the disks that have it"""
    listed: Collection[int]
    """disks that have its list"""


@dataclass(frozen=True)
class Move:
    """A file's way between two disks, or two ranks."""

    name: str
    source: int
    target: int


def found_in(step: int, held: Sequence[Held | None], of_rank: Sequence[int]) -> Found | None:
    """By what each rank says it holds; `of_rank`: its disk. Files under different lists are of different writings of
    the step, and never put together."""
    lists = [dict(one.sums) for one in held if one]
    for sums in lists:
        same = [(disk, one) for disk, one in zip(of_rank, held, strict=True) if one and one.sums == sums]
        disks = {name: sorted({disk for disk, one in same if name in one.whole}) for name in sums}
        if sums and all(disks.values()):
            return Found(step, sums, disks, {disk for disk, _ in same})
    return None


def nowhere(sums: Mapping[str, str], held: Sequence[Held | None]) -> list[str]:
    """Files of such a list that no disk has whole."""
    whole = set[str]().union(*(one.whole for one in held if one and one.sums == sums))
    return sorted(sums.keys() - whole)


def lacking(disks: Mapping[str, Sequence[int]], needed: Sequence[Collection[str]], copies: int = 2) -> list[Move]:
    """Moves after which each disk has what it needs of these files, and each file is on so many disks, one or two, if
    there are so many.

    `disks`: those that have a file, by its name; `needed`: names, by disk.
    """
    moves = []
    for name, holders in sorted(disks.items()):
        targets = [disk for disk, names in enumerate(needed) if name in names and disk not in holders]
        if len(needed) > 1 and len(holders) + len(targets) < copies:
            targets.append((holders[0] + 1) % len(needed))
        moves += [Move(name, holders[i % len(holders)], target) for i, target in enumerate(targets)]
    return moves


def in_rounds(moves: Sequence[Move]) -> list[Move]:
    """In an order in which ranks that take one after the other wait for each other as little as they can."""
    left, ordered = list(moves), list[Move]()
    while left:
        busy, later = set[int](), list[Move]()
        for move in left:
            if busy & {move.source, move.target}:
                later.append(move)
            else:
                busy |= {move.source, move.target}
                ordered.append(move)
        left = later
    return ordered
