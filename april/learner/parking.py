"""Offload of a rank's state to the host while engines use its accelerator.

Storages are freed and refilled in place, so that parameters, shards and moments stay the same objects for any back end.
Restored values are bitwise the same.
"""

import ctypes
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

Storages = list[UntypedStorage]
Refill = Callable[[Storages], None]
"""Copies the offloaded bytes back into storages of the same sizes."""


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


def offload_to_memory(storages: Storages) -> Refill:
    copies = [as_bytes(storage).to("cpu", copy=True) for storage in storages]

    def refill(storages: Storages) -> None:
        for storage, copy in zip(storages, copies, strict=True):
            as_bytes(storage).copy_(copy)

    return refill


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
