"""Division of the weights over the ranks of the learner: each rank gathers whole tensors, about a share 1 / R of all
bytes, from the ranks that hold their rows.

Rows go straight into the buffer from which they are sent or written. Beside its part, a rank has at most two buckets in
transfer.

part = gather_part(version, backend.divisible_weights(), dtype)
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, cycle, zip_longest
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from april.learner.loading import FileTensor, persistent_buffers, tensors_in_files
from april.learner.model import BUCKET_BYTES, sharded_dim
from april.learner.process_group import all_gather_values
from april.weights.channel import TensorHead
from april.weights.folders import WrittenFile
from april.weights.snapshot import (
    ALIGNMENT_BYTES,
    DTYPES,
    Snapshot,
    byte_size,
    digest,
    empty_buffer,
    fused_name,
    layout,
)
from april.wire.message import Version

IN_FLIGHT = 2
"""Most buckets in transfer between ranks at a time."""


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of the weights as workers and files have it: consecutive values of one of the model's."""

    name: str
    """Name in Hugging Face files."""
    tensor: Tensor
    """The model's tensor, whole or sharded by rows: all experts of a layer, of which this one may be a part."""
    first: int
    """Index of the first value in the flattened `tensor`."""
    shape: torch.Size

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Self:
        """A tensor that files have as the model has it."""
        return cls(name, tensor, 0, tensor.shape)

    @property
    def end(self) -> int:
        """Index after the last value in the flattened `tensor`."""
        return self.first + self.shape.numel()


class DivisibleWeights:
    """The weights of a model, and its buffers, as Hugging Face files have them."""

    def __init__(self, lm: nn.Module):
        self.lm = lm

    def tensors(self) -> list[WeightTensor] | None:
        """None if files do not have consecutive values of the model's tensors, or some are sharded by anything but
        rows, or of a dtype that no part has."""
        named = self.named()
        if self.in_files is None or not all(map(is_divisible, named.values())):
            return None
        return [WeightTensor(name, named[each.source], each.first, each.shape) for name, each in self.in_files.items()]

    def named(self) -> dict[str, Tensor]:
        """The model's own tensors."""
        return dict(chain(self.lm.named_parameters(), persistent_buffers(self.lm)))

    @cached_property
    def in_files(self) -> dict[str, FileTensor] | None:
        """Where in the model's tensors those of files lie: the same for all versions, and for thousands of experts a
        second's work."""
        return tensors_in_files(self.lm, {name: tensor.shape for name, tensor in self.named().items()})


def is_divisible(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype of parts, and is whole on every rank, or divided by rows over the last dimension of
    its mesh alone."""
    if not isinstance(tensor, DTensor):
        return tensor.dtype in DTYPES.values()
    *others, _ = tensor.placements
    return sharded_dim(tensor) in (None, 0) and all(placement.is_replicate() for placement in others)


def divide(heads: Sequence[TensorHead], ranks: int, holders: Sequence[Collection[int]] = ()) -> list[int]:
    """The rank that gathers each tensor: the largest first, each to a rank that has it already, such as a whole expert,
    unless that has its share of all bytes; otherwise to the rank with the fewest bytes so far. What a server
    concatenates stays together. `holders`: for each tensor the ranks that hold all of it."""
    units: dict[str, list[int]] = {}
    for index, head in enumerate(heads):
        units.setdefault(fused_name(head.name), []).append(index)
    sizes = {unit: sum(byte_size(heads[index]) for index in members) for unit, members in units.items()}
    owners, loads, share = [0] * len(heads), [0] * ranks, sum(sizes.values()) / ranks
    for unit in sorted(units, key=lambda unit: -sizes[unit]):
        holding = set.intersection(*(set(holders[index]) for index in units[unit])) if holders else set()
        near = [rank for rank in sorted(holding) if loads[rank] + sizes[unit] <= share]
        owner = min(near or range(ranks), key=loads.__getitem__)
        loads[owner] += sizes[unit]
        for index in units[unit]:
            owners[index] = owner
    return owners


def holders(each: WeightTensor) -> Collection[int]:
    """The ranks that hold all values of a sharded tensor; none if none does, or all do."""
    if not isinstance(each.tensor, DTensor) or sharded_dim(each.tensor) is None or each.first == each.end:
        return ()
    rows = each.tensor.device_mesh.mesh.reshape(-1, each.tensor.device_mesh.shape[-1])
    values = values_per_rank(each.tensor)
    place = each.first // values
    return rows[:, place].tolist() if (each.end - 1) // values == place else ()


@dataclass(frozen=True)
class Piece:
    """Consecutive values of a tensor, and their place in the buffer of the rank that gathers them."""

    tensor: Tensor
    dtype: torch.dtype
    first: int
    """Index of the first value in the whole flattened tensor."""
    end: int
    offset: int
    """Position of the first value in the buffer, bytes."""


@dataclass(frozen=True)
class Share:
    """The values of a piece that one rank holds."""

    piece: Piece
    first: int
    """Index of the first value in the whole flattened tensor."""
    end: int

    @property
    def size(self) -> int:
        """Size of the values as they are sent, bytes."""
        return (self.end - self.first) * self.piece.dtype.itemsize

    def place(self) -> slice:
        """Where the values lie in the buffer of the rank that gathers them."""
        start = self.piece.offset + (self.first - self.piece.first) * self.piece.dtype.itemsize
        return slice(start, start + self.size)


def shares(bucket: Iterable[Piece], rank: int, owner: int) -> list[Share]:
    """The values of a bucket that `rank` gives to `owner`."""
    found = []
    for piece in bucket:
        first, end = held_values(piece.tensor, rank, owner)
        first, end = max(first, piece.first), min(end, piece.end)
        if first < end:
            found.append(Share(piece, first, end))
    return found


def held_values(tensor: Tensor, rank: int, owner: int) -> tuple[int, int]:
    """First and last index (exclusive) of the values of a flattened tensor that `rank` gives to `owner`. FSDP2's rank r
    of R has the r-th `ceil(n / R)` of n rows."""
    if not isinstance(tensor, DTensor) or sharded_dim(tensor) is None:
        return (0, tensor.numel()) if rank == owner else (0, 0)
    places = ranks_of_copy(tensor.device_mesh, owner)
    if rank not in places:
        return (0, 0)
    each = values_per_rank(tensor)
    return min(places[rank] * each, tensor.numel()), min((places[rank] + 1) * each, tensor.numel())


def values_per_rank(tensor: DTensor) -> int:
    """Most values of a tensor divided by rows that a rank holds."""
    return -(-tensor.shape[0] // tensor.device_mesh.shape[-1]) * math.prod(tensor.shape[1:])


@cache
def ranks_of_copy(mesh: DeviceMesh, owner: int) -> dict[int, int]:
    """Rank -> its place among the ranks that divide a copy of each tensor with `owner`: a row of the mesh."""
    rows = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    return next({rank: place for place, rank in enumerate(row)} for row in rows if owner in row)


def gather_part(version: Version, tensors: Sequence[WeightTensor], dtype: torch.dtype | None = None) -> Snapshot:
    """This rank's part of the weights, on the CPU; sharded tensors in `dtype` (None: float32). Collective.

    `tensors`: from `DivisibleWeights`, in the same order on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent_in = dtype or torch.float32
    dtypes = [sent_in if isinstance(each.tensor, DTensor) else each.tensor.dtype for each in tensors]
    heads = [
        TensorHead(each.name, str(own).removeprefix("torch."), list(each.shape))
        for each, own in zip(tensors, dtypes, strict=True)
    ]
    owners = divide(heads, ranks, [holders(each) for each in tensors])
    gathered: list[list[list[Piece]]] = []
    for each in range(ranks):
        members = [i for i, owner in enumerate(owners) if owner == each]
        offsets, size = layout([heads[i] for i in members])
        divided = (pieces(tensors[i], dtypes[i], offset) for i, offset in zip(members, offsets, strict=True))
        gathered.append(list(in_buckets(chain.from_iterable(divided))))
        if each == rank:
            own_heads, data = [heads[i] for i in members], empty_buffer(size)
    rotating = ((owner, bucket) for row in zip_longest(*gathered) for owner, bucket in enumerate(row) if bucket)
    under_way: deque[Transfer] = deque()
    memories = [MessageMemory() for _ in range(IN_FLIGHT)]
    for (owner, bucket), memory in zip(rotating, cycle(memories)):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().finish()
        under_way.append(Transfer(bucket, owner, data, memory))
    while under_way:
        under_way.popleft().finish()
    for head, offset in zip(own_heads, layout(own_heads)[0], strict=True):
        end = offset + byte_size(head)
        data[end : end + -end % ALIGNMENT_BYTES] = 0
    return Snapshot(version, own_heads, data, digest(data))


def pieces(each: WeightTensor, dtype: torch.dtype, offset: int) -> Iterator[Piece]:
    """A tensor in pieces of at most `BUCKET_BYTES` in the dtype in which it is sent. `offset`: its place in the buffer
    of the rank that gathers it, bytes."""
    most = BUCKET_BYTES // dtype.itemsize
    for first in range(each.first, each.end, most):
        yield Piece(
            each.tensor, dtype, first, min(first + most, each.end), offset + (first - each.first) * dtype.itemsize
        )


def in_buckets(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces in buckets of at most `BUCKET_BYTES`."""
    bucket, size = list[Piece](), 0
    for piece in pieces:
        piece_bytes = (piece.end - piece.first) * piece.dtype.itemsize
        if bucket and size + piece_bytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece_bytes
    if bucket:
        yield bucket


class MessageMemory:
    """Memory for the messages of a bucket, which those of the next one use again once it has arrived. Memory of their
    own would stay with the process, in pieces of many sizes."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, messages: list[list[Share]]) -> list[Tensor]:
        """A place for each message, uint8 [bytes]: its shares one after the other, each aligned."""
        sizes = [sum(aligned(share.size) for share in its) for its in messages]
        if messages and self._bytes.numel() < sum(sizes):
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=messages[0][0].piece.tensor.device)
        return list(self._bytes[: sum(sizes)].split(sizes)) if messages else []


class Transfer:
    """A bucket on its way from the ranks that hold its values to the rank that gathers it."""

    def __init__(self, bucket: list[Piece], owner: int, data: Tensor, memory: MessageMemory):
        """Start to send or to receive this rank's values of the bucket. Collective. `data`: this rank's buffer."""
        self.data, rank = data, dist.get_rank()
        self.received: list[tuple[list[Share], Tensor]] = []
        """Values that each other rank sends to this one."""
        operations = []
        if rank != owner and (own := shares(bucket, rank, owner)):
            (message,) = memory.take([own])
            fill(message, own, rank, owner)
            operations.append(dist.P2POp(dist.isend, message, owner))
        elif rank == owner:
            given = {other: shares(bucket, other, owner) for other in range(dist.get_world_size()) if other != rank}
            given = {other: its for other, its in given.items() if its}
            self.received = list(zip(given.values(), memory.take(list(given.values())), strict=True))
            of_others = zip(given, self.received, strict=True)
            operations = [dist.P2POp(dist.irecv, message, other) for other, (_, message) in of_others]
        self.works = dist.batch_isend_irecv(operations) if operations else []
        if rank == owner:
            for share in shares(bucket, rank, owner):
                data[share.place()] = as_bytes(values_of(share, rank, owner).to(share.piece.dtype))

    def finish(self) -> None:
        """Wait until this rank's values are sent, or those of all others are in its buffer."""
        for work in self.works:
            work.wait()
        for its, message in self.received:
            for share, sent in zip(its, message.split([aligned(share.size) for share in its]), strict=True):
                self.data[share.place()] = sent[: share.size]


def values_of(share: Share, rank: int, owner: int) -> Tensor:
    """The values of a share that this rank holds, flat, in the dtype of the tensor."""
    tensor = share.piece.tensor
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    start, _ = held_values(tensor, rank, owner)
    return local.detach().reshape(-1)[share.first - start : share.end - start]


def fill(message: Tensor, own: list[Share], rank: int, owner: int) -> None:
    """Write this rank's values of a bucket into their message."""
    for share, place in zip(own, message.split([aligned(share.size) for share in own]), strict=True):
        place[: share.size].view(share.piece.dtype).copy_(values_of(share, rank, owner))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


# --- files of parts ---------------------------------------------------------------------------------------------------


def written_by_all(
    write: Callable[[], list[WrittenFile]], what: str, group: dist.ProcessGroup
) -> list[list[WrittenFile]]:
    """The files of each rank, which writes its part with `write`. Raises OSError on every rank if one of them could
    not. `what`: what is written, in words. Collective."""
    written: list[WrittenFile] | str
    try:
        written = write()
    except Exception as error:  # the other ranks wait for what becomes of each
        written = f"rank {dist.get_rank()} cannot write its part of {what}: {error}"
    files = list[list[WrittenFile]]()
    for its in all_gather_values(written, list[WrittenFile] | str, group):
        if isinstance(its, str):
            raise OSError(its)
        files.append(its)
    return files
