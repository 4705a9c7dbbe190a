"""Time sharing of an accelerator between learner and engines: outside its time slice the learner's state is offloaded.

time_slice = TimeSlice(config, device, rank)
time_slice.acquire()                        # before anything is allocated on the device
...                                         # load, gather the weights
time_slice.release(trainer)                 # state goes to the host; engines may generate
metrics = time_slice.acquire()              # a batch has arrived, and no engine holds device memory
"""

import ctypes
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from april.config import Config
from april.learner.model import await_copies
from april.learner.trainer import Trainer
from april.util.pulse import MAIN
from april.util.time_sharing import LearnerTimeSharing, accelerator_names

log = logging.getLogger(__name__)

# --- offload ----------------------------------------------------------------------------------------------------------

Storages = list[UntypedStorage]
Refill = Callable[[Storages], None]
"""Function that copies the offloaded bytes back into re-allocated storages of the same sizes."""


class HostOffload:
    """Moves tensors' memory from the device to the host and back, in place."""

    def __init__(self, device: torch.device, folder: Path):
        """`folder` is for the file that holds the state if the device is the CPU, where offloading to memory frees
        nothing."""
        self.device, self.folder = device, folder
        self._offloaded: list[tuple[UntypedStorage, int]] = []
        self._refill: Refill | None = None

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of `tensors` to the host and free their device memory; returns the bytes freed."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.device.type == self.device.type:
                found[storage.data_ptr()] = storage
        storages = list(found.values())
        self._offloaded = [(storage, storage.nbytes()) for storage in storages]
        self._refill = (
            offload_to_file(storages, self.folder) if self.device.type == "cpu" else offload_to_memory(storages)
        )
        for storage in storages:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(size for _, size in self._offloaded)

    def restore(self) -> None:
        """Allocate the storages again and copy their contents back."""
        for storage, size in self._offloaded:
            storage.resize_(size)
        if self._refill:
            self._refill([storage for storage, _ in self._offloaded])
        self._offloaded, self._refill = [], None


PIECE_BYTES = 16 * 2**20
"""Bytes of page-locked memory that are allocated together; torch rounds every allocation up to a power of two, and uses
it again for the next offload."""


def offload_to_memory(storages: Storages) -> Refill:
    copies = [[on_host(piece) for piece in as_bytes(storage).split(PIECE_BYTES)] for storage in storages]
    await_copies()

    def refill(storages: Storages) -> None:
        for storage, pieces in zip(storages, copies, strict=True):
            for target, piece in zip(as_bytes(storage).split(PIECE_BYTES), pieces, strict=True):
                target.copy_(piece, non_blocking=True)
        await_copies()

    return refill


def on_host(piece: Tensor) -> Tensor:
    """Start to copy bytes to the host, from an accelerator into page-locked memory."""
    copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.device.type == "cuda")
    return copy.copy_(piece, non_blocking=True)


def offload_to_file(storages: Storages, folder: Path) -> Refill:
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    for storage in storages:
        file.write(memory_of(storage))
    file.seek(0)

    def refill(storages: Storages) -> None:
        with file:
            if any(file.readinto(memory_of(storage)) != storage.nbytes() for storage in storages):
                raise OSError("the file of the offloaded state is truncated")

    return refill


def as_bytes(storage: UntypedStorage) -> Tensor:
    """The memory of a storage as a tensor, uint8 [bytes]; not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(storage: UntypedStorage) -> ctypes.Array:
    """The memory of a CPU storage as a buffer for file I/O. A numpy array would keep the storage from being resized."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


# --- time slices ------------------------------------------------------------------------------------------------------


class TimeSlice:
    """The learner's time slice on an accelerator that it shares with engines in turn. Without `devices.turns` it is not
    shared: the slice never ends, and all methods do nothing."""

    def __init__(self, config: Config, device: torch.device, rank: int):
        self.patience_s = config.devices.turn_s
        names = accelerator_names(device.type)
        own = names[device.index : device.index + 1] if device.type == "cuda" else names[rank:]
        self._time_sharing = LearnerTimeSharing(config.run_dir, own) if config.devices.turns else None
        self._host_offload = HostOffload(device, config.run_dir)
        self._offload_s = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether engines have time slices on the accelerator, too."""
        return self._time_sharing is not None

    def acquire(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Wait for the accelerator and move the offloaded state back onto it; returns the seconds of both as metrics,
        {} if the learner's time slice is running or never ends. A learner that has state passes `group`, in which all
        ranks wait for each other. Raises TimeSliceLate."""
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
