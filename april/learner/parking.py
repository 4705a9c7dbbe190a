"""A rank's state on the host while others have its accelerator.

Storages are emptied in place and filled again, so that parameters, their shards and moments stay the objects that they
are, whatever back end has made them. What comes back is bitwise what went.
"""

import ctypes
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

Storages = list[UntypedStorage]
Fill = Callable[[Storages], None]


class Parking:
    def __init__(self, device: torch.device, folder: Path):
        """`folder`: of a file in the place of memory where device and host are one, the CPU."""
        self.device, self.folder = device, folder
        self._parked: list[tuple[UntypedStorage, int]] = []
        self._fill: Fill | None = None

    def park(self, tensors: Iterable[Tensor]) -> int:
        """Let the device have their memory; how much that is (bytes)."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.device.type == self.device.type:
                found[storage.data_ptr()] = storage
        storages = list(found.values())
        self._parked = [(storage, storage.nbytes()) for storage in storages]
        self._fill = keep_in_file(storages, self.folder) if self.device.type == "cpu" else keep_in_memory(storages)
        for storage in storages:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(size for _, size in self._parked)

    def unpark(self) -> None:
        """All of it is there again."""
        for storage, size in self._parked:
            storage.resize_(size)
        if self._fill:
            self._fill([storage for storage, _ in self._parked])
        self._parked, self._fill = [], None


def keep_in_memory(storages: Storages) -> Fill:
    copies = [as_bytes(storage).to("cpu", copy=True) for storage in storages]

    def fill(storages: Storages) -> None:
        for storage, copy in zip(storages, copies, strict=True):
            as_bytes(storage).copy_(copy)

    return fill


def keep_in_file(storages: Storages, folder: Path) -> Fill:
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    for storage in storages:
        file.write(memory_of(storage))
    file.seek(0)

    def fill(storages: Storages) -> None:
        with file:
            if any(file.readinto(memory_of(storage)) != storage.nbytes() for storage in storages):
                raise OSError("the state that was put aside is not whole")

    return fill


def as_bytes(storage: UntypedStorage) -> Tensor:
    """uint8 [bytes]: the very memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(storage: UntypedStorage) -> ctypes.Array:
    """The same of one on the CPU, as a file takes it. An array of numpy would keep it from being emptied."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
