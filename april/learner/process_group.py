"""Joining and leaving the learner's process group under torchrun."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from april.config import LearnerSection

HANDOVER_TIMEOUT = timedelta(days=7)
"""ranks wait this long for rank 0's next batch: generation may take hours, and torchrun ends the ranks of a
learner whose rank 0 has died, so it owns this wait"""


def join(section: LearnerSection) -> torch.device:
    """Enter the default group (gloo on CPU; NCCL or RCCL beside gloo on accelerators); this rank's device."""
    torch.set_num_threads(section.threads)
    kind = section.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    timeout = timedelta(seconds=section.collective_timeout_s)
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timeout)
    return device


def handover_group() -> dist.ProcessGroup:
    """A gloo group over all ranks in which the others wait for rank 0's next batch. Collective."""
    return dist.new_group(backend="gloo", timeout=HANDOVER_TIMEOUT)


def leave() -> None:
    dist.destroy_process_group()
