"""Joining and leaving the learner's process group under torchrun."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from april.config import LearnerSection
from april.connections.route import interface_towards

HANDOVER_TIMEOUT = timedelta(days=7)
"""ranks wait this long for rank 0's next batch: generation may take hours, and torchrun ends the ranks of a
learner whose rank 0 has died, so it owns this wait"""


def join(section: LearnerSection) -> torch.device:
    """Enter the default group (gloo on CPU; NCCL or RCCL beside gloo on accelerators); this rank's device.

    On one machine gloo can be reached from nowhere else; on several it takes the way that leads to the first.
    """
    torch.set_num_threads(section.threads)
    kind = section.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if interface := interface_of_ranks():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=section.collective_timeout_s)
    meeting = meeting_of_this_start(timeout)
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=timeout, **meeting)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timeout, **meeting)
    return device


def interface_of_ranks() -> str:
    """By which ranks reach each other; empty where that cannot be said."""
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "lo"
    interface = interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if interface != "lo":
        return interface
    return ""  # on the machine that the others come to: gloo takes the one by which its own name is found


def meeting_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """Store, rank and world size. torchrun keeps its store when it restarts the ranks, and with it the addresses of
    those that are gone, so each start uses names of its own."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"start_{start}", store), "rank": rank, "world_size": world_size}


def handover_group() -> dist.ProcessGroup:
    """A gloo group over all ranks in which the others wait for rank 0's next batch. Collective."""
    return dist.new_group(backend="gloo", timeout=HANDOVER_TIMEOUT)


def leave() -> None:
    dist.destroy_process_group()
