"""The weight transport for a learner and a worker on one accelerator: by CUDA IPC both open the same memory of it, a
ring of slots into which the learner copies what the worker copies out. So weights reach the worker without the host.

The handle of the ring goes over the Unix socket of `SharedMemoryTransport`, which takes processes of the same user
only, and so do the messages that say which slots are full or empty.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from april.config import WeightsSection
from april.util.errors import refuse
from april.weights import TRANSPORTS
from april.weights.transports import FOR_OTHERS, OtherMachine, Received, SharedMemoryLink, SharedMemoryTransport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SLOT_BYTES, SLOTS = 2**25, 2
"""Bytes of a slot, so many that waiting for a copy takes little of the time of the copy itself; number of slots in a
ring."""


class CudaIpcTransport(SharedMemoryTransport):
    """Copies weights within an accelerator that the learner's only rank shares with a worker."""

    forwards = False
    device: ClassVar[str] = "cuda"

    def __init__(self, config: WeightsSection):
        """Raises ConfigError if the machine has no CUDA device."""
        super().__init__(config)
        self._rings: list[Tensor] = []
        """Rings that no link uses now, kept for the next link: torch never frees memory that a killed process had
        opened."""
        self.check()

    def check(self) -> None:
        import torch

        if not torch.cuda.is_available():
            refuse(
                "weights.transport",
                self.config.transport,
                "hands weights over in the memory of a CUDA device, and this machine has none",
                f"use {TRANSPORTS.names_where(lambda one: one.is_local and one.device == 'cpu')}",
            )

    def give_handle(self, peer: socket.socket, ring: "Tensor") -> None:
        """Send the worker, over the socket `peer`, what it needs to open the ring: its CUDA IPC handle, and the UUID of
        its accelerator."""
        import torch

        torch.cuda.current_stream().synchronize()  # whatever used this memory before
        _, *handle = ring.untyped_storage()._share_cuda_()
        peer.sendall(msgspec.msgpack.encode((uuid_of(ring.device.index), handle)))

    def open_handle(self, content: bytes, descriptors: list[int]) -> "torch.UntypedStorage":
        """The memory of the learner's ring, opened by the handle in the learner's message `content`. Raises
        OtherMachine if the ring is on an accelerator that this process does not have."""
        import torch

        try:
            uuid, handle = msgspec.msgpack.decode(content, type=tuple[str, list[Any]])
        except msgspec.MsgspecError:
            raise OtherMachine(f"{self._said} is not what the learner has; set the same for both") from None
        here = [index for index in range(torch.cuda.device_count()) if uuid_of(index) == uuid]
        if not here:
            raise OtherMachine(f"{self._said} takes a worker on the learner's accelerator only; {FOR_OTHERS}")
        return torch.UntypedStorage._new_shared_cuda(here[0], *handle)

    def _lend(self, peer: socket.socket) -> "DeviceLink":
        import torch

        free = self._rings.pop() if self._rings else None
        ring = torch.empty(SLOTS, SLOT_BYTES, dtype=torch.uint8, device=self.device) if free is None else free
        self.give_handle(peer, ring)
        return DeviceLink(peer, ring, self._rings.append)

    def _borrow(self, peer: socket.socket, content: bytes, descriptors: list[int]) -> "DeviceLink":
        import torch

        storage = self.open_handle(content, descriptors)
        ring = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (SLOTS, SLOT_BYTES))
        return DeviceLink(peer, ring)


def uuid_of(index: int) -> str:
    """UUID of this process's accelerator number `index`; other processes may know the same accelerator by another
    number."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


class DeviceLink(SharedMemoryLink):
    """One side of a weight channel through an accelerator's memory. A slot is said to be full or empty once its copy is
    done; the copies wait for nothing that trains or generates."""

    def __init__(self, peer: socket.socket, ring: "Tensor", give_back: Callable[["Tensor"], object] = id):
        """`peer`: socket to the other side. `ring`: the shared slots, uint8 [slots, bytes]. `give_back` is called with
        the ring once the link is closed."""
        import torch

        super().__init__(peer, ring)
        self._give_back = give_back
        self._stream = torch.cuda.Stream(ring.device) if ring.is_cuda else None

    def copy(self, to: "Tensor", source: "Tensor") -> None:  # type: ignore[override]
        import torch

        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            to.copy_(source)
        if self._stream:
            self._stream.synchronize()

    @staticmethod
    def divided(bucket: "Tensor", size: int) -> "list[Tensor]":
        return list(bucket.split(size))

    def receive_each(self, buckets: "Iterable[Tensor]", deadline: float, received: Received) -> None:
        import torch

        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())  # which may still use the buckets' memory
        super().receive_each(buckets, deadline, received)

    def close(self) -> None:
        super().close()
        self._give_back(self._slots)
        self._slots = self._slots[:0].clone()  # closes the worker's handle
