"""Time sharing of an accelerator between learner and engines: outside its time slice the learner's state is offloaded.

time_slice = TimeSlice(config, device, rank)
time_slice.acquire()                        # before anything is allocated on the device
...                                         # load, gather the weights
time_slice.release(trainer)                 # state goes to the host; engines may generate
metrics = time_slice.acquire()              # a batch has arrived, and no engine holds device memory
"""

import logging
import os
import time

import torch
import torch.distributed as dist

from april.config import Config
from april.learner.parking import HostOffload
from april.learner.trainer import Trainer
from april.processes.device_turns import LearnerTimeSharing, accelerator_names
from april.processes.pulse import MAIN

log = logging.getLogger(__name__)


class TimeSlice:
    """The learner's time slice on its accelerator; without `devices.turns` it never ends and all methods do nothing."""

    def __init__(self, config: Config, device: torch.device, rank: int):
        self.patience_s = config.devices.turn_s
        names = accelerator_names(device.type)
        own = names[device.index : device.index + 1] if device.type == "cuda" else names[rank:]
        self._time_sharing = LearnerTimeSharing(config.run_dir, own) if config.devices.turns else None
        self._host_offload = HostOffload(device, config.run_dir)
        self._offload_s = 0.0

    def acquire(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Wait for the accelerator and move the state back onto it; returns the seconds of both. A learner that has
        state passes `group`, in which all ranks wait for each other. Raises TimeSliceLate."""
        if self._time_sharing is None or self._time_sharing.has_slice:
            return {}
        MAIN.at("waiting for the accelerator", takes_long=True)
        waited_s, began = self._time_sharing.take(self.patience_s), time.perf_counter()
        if group:
            dist.barrier(group)
        self._host_offload.restore()
        return {"turn_wait_s": waited_s, "turn_move_s": self._offload_s + time.perf_counter() - began}

    def release(self, trainer: Trainer) -> None:
        """Offload the trainer's state to the host and let engines use the accelerator."""
        if self._time_sharing is None:
            return
        MAIN.at("offloading its state", takes_long=True)
        began = time.perf_counter()
        freed_bytes = self._host_offload.offload(trainer.device_tensors())
        self._time_sharing.release()
        self._offload_s = time.perf_counter() - began
        log.info(
            "%d bytes of state are on the host during the engines' time slice (process %d)", freed_bytes, os.getpid()
        )
