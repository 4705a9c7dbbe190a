"""Two ranks of a learner and who attacks them: `python -m april.learner.launch ... -m THIS KIND FOLDER` for the ranks,
`python -m THIS impostor FOLDER PORT` for another process of the machine that takes the place of rank 1.

KIND `late`: rank 1 comes once FOLDER/go exists. KIND `pickles`: rank 1 itself sends what runs code if it is unpickled.
KIND `guarded`: the jobs of `rank_jobs.py`, in ranks that fail if torch or April unpickles anything but tensors and what
April's own reader of checkpoints permits.
"""

import os
import pickle
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from april.config import LearnerSection
from april.learner import process_group
from april.learner.launch import STORE_FILE
from april.learner.store import CheckpointStore
from april.util.lifetime import exit_at_once
from tests.support.learner import rank_jobs

PLANTED = "planted"
"""Name of the folder in FOLDER that unpickling an attacker's bytes makes."""
LIMIT_S = 60


class Plant:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder / PLANTED)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def refused(*_, **__):
    raise AssertionError("a rank unpickles")


def rank(kind: str, folder: Path) -> None:
    number = int(os.environ["RANK"])
    if kind == "guarded":
        pickle.load = pickle.loads = distributed_c10d._unpickler = refused
        torch.load = partial(torch.load, weights_only=True)
        rank_jobs.main(folder)
    if number == 0:
        (folder / "store").write_text(os.environ.get(STORE_FILE, ""))
    while kind == "late" and number == 1 and not (folder / "go").exists():
        time.sleep(0.01)
    process_group.join(LearnerSection(device="cpu", collective_timeout_s=LIMIT_S))
    if kind == "pickles" and number == 1:
        plant(folder)
    else:
        CheckpointStore(folder / "checkpoints", 1, LIMIT_S)
    exit_at_once(0)


def plant(folder: Path) -> None:
    """Send the other rank a pickle, as the first word of a checkpoint store's group, and unpickle nothing here."""
    distributed_c10d._tensor_to_object = lambda *_: None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))
    dist.all_gather_object([None, None], Plant(folder), group)


def impostor(folder: Path, port: int) -> None:
    """Be rank 1 of the ranks whose store listens at `port`."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.PrefixStore("start_0", store), rank=1, world_size=2)
    plant(folder)


if __name__ == "__main__":
    kind, where, *port = sys.argv[1:]
    impostor(Path(where), int(port[0])) if port else rank(kind, Path(where))
