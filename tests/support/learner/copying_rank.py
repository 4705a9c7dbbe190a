"""Program of one of two ranks on disks of their own that copy files to each other, some of which cannot be copied."""

import sys
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist

from april.config import LearnerSection
from april.learner import process_group
from april.learner.checkpoint_copies import Disks, FileTransfer

COPIES = {"whole": (0, 1), "missing": (0, 1), "no_room": (1, 0), "after": (1, 0)}
"""Source and target of each file; each is copied by a call of its own."""


def main(folder: Path) -> None:
    process_group.join(LearnerSection())
    own, rank = folder / f"disk_{dist.get_rank()}", dist.get_rank()
    own.mkdir()
    for name, (source, _) in COPIES.items():
        if rank == source and name != "missing":
            (own / name).write_bytes(name.encode())
    (own / "no_room.partial").mkdir()  # where the copy would be written
    disks, said = Disks(own, process_group.long_wait_group()), {}
    for name, (source, target) in COPIES.items():
        try:
            disks.transfer([FileTransfer(name, source, target)], own, {name: sha256(name.encode()).hexdigest()})
            said[name] = ""
        except OSError as error:
            said[name] = str(error)
    of_ranks = disks.all_gather(said, dict[str, str])
    if rank == 0:
        torch.save(of_ranks, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
