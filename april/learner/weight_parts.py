"""Division of the weights over the ranks of the learner: each rank gathers whole tensors, about a share 1 / R of all
bytes, from the ranks that hold their rows.

Rows go straight into the buffer from which they are sent or written. Beside its part, a rank has at most two buckets in
transfer.

part = gather_part(version, backend.divisible_weights(), dtype)
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle, zip_longest
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from april.learner.frozen_base import shape_in_files
from april.learner.held_tensors import HeldTensor, Span
from april.learner.loading import FileTensor, persistent_buffers, tensors_in_files
from april.learner.model import BUCKET_BYTES
from april.learner.process_group import all_gather_values
from april.weights.channel import TensorHead
from april.weights.folders import WrittenFile
from april.weights.snapshot import (
    ALIGNMENT_BYTES,
    Snapshot,
    byte_size,
    empty_buffer,
    fused_name,
    layout,
    snapshot_of,
)
from april.wire.message import Version

IN_FLIGHT = 2
"""Largest number of buckets (lists of pieces, see `in_buckets`) that are in transfer between ranks at a time."""


@dataclass(frozen=True)
class WeightTensor:
    """A tensor as workers and Hugging Face files have it: consecutive values of one of the model's tensors, which may
    be all of them."""

    name: str
    """Name in Hugging Face files."""
    held: HeldTensor
    """The model's tensor that contains this one: the same, or one that stacks all experts of a layer."""
    first: int
    """Index of this tensor's first value in the flattened tensor `held`."""
    shape: torch.Size

    @classmethod
    def whole(cls, name: str, held: HeldTensor) -> Self:
        """The weight `name` of files that is the whole of the model's tensor `held`."""
        return cls(name, held, 0, held.shape)

    @property
    def end(self) -> int:
        """Index after this tensor's last value in the flattened tensor `held`."""
        return self.first + self.shape.numel()


class DivisibleWeights:
    """Finds out how the tensors that Hugging Face files of a model have lie in the model's own parameters and buffers,
    so that the weights can be divided over ranks tensor by tensor."""

    def __init__(self, lm: nn.Module):
        self.lm = lm
        self.in_files = cache(self.find_in_files)

    def tensors(self, held: Iterable[tuple[str, HeldTensor | None]]) -> list[WeightTensor] | None:
        """The tensors that Hugging Face files of the model have, each with its place in a tensor of the model. `held`:
        for each parameter of the model, (name, how the ranks hold it, or None); the model's buffers are added to them.
        The result is None if a parameter or buffer has no `HeldTensor`, or if a tensor of the files is not a run of
        consecutive values of one tensor of the model."""
        of_buffers = ((name, HeldTensor.of(buffer)) for name, buffer in persistent_buffers(self.lm))
        named = dict(chain(held, of_buffers))
        known = {name: tensor for name, tensor in named.items() if tensor}
        found = self.in_files(tuple(known)) if len(known) == len(named) else None
        if found is None:
            return None
        return [WeightTensor(name, known[each.source], each.first, each.shape) for name, each in found.items()]

    def find_in_files(self, names: tuple[str, ...]) -> dict[str, FileTensor] | None:
        """For each tensor that Hugging Face files of the model have, by its name there: the consecutive values that it
        is of one of the model's tensors `names`; None if a tensor of the files is not such a run of values. The result
        is the same for all versions, and takes a second to find for thousands of experts."""
        tensors = dict(chain(self.lm.named_parameters(), persistent_buffers(self.lm)))
        shapes = {name: torch.Size(shape_in_files(self.lm, name, tensors[name])) for name in names}
        return tensors_in_files(self.lm, shapes)


def divide(heads: Sequence[TensorHead], ranks: int, holders: Sequence[Collection[int]] = ()) -> list[int]:
    """The rank that gathers each tensor. `heads`: name, dtype and shape of each tensor. Tensors are assigned in order
    of size, the largest first: to a rank that holds all of the tensor, such as an expert, as long as the rank's bytes
    stay within 1 / `ranks` of all bytes, otherwise to the rank with the fewest bytes so far. Tensors that an inference
    server concatenates go to one rank. `holders`: for each tensor the ranks that hold all of it."""
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


@dataclass(frozen=True)
class Piece:
    """Consecutive values of a tensor, and their place in the buffer of the rank that gathers them."""

    held: HeldTensor
    dtype: torch.dtype
    first: int
    """Index of the piece's first value in the whole flattened tensor of the model (`held`)."""
    end: int
    offset: int
    """Position of the piece's first value in the buffer of the rank that gathers it, bytes."""


@dataclass(frozen=True)
class Share:
    """The values of a piece that one rank holds and sends to the rank that gathers the piece."""

    piece: Piece
    span: Span

    @property
    def size(self) -> int:
        """Size of the values as they are sent, bytes."""
        return (self.span.end - self.span.first) * self.piece.dtype.itemsize

    def write(self, data: Tensor, values: Tensor) -> None:
        """Write the values, uint8 [size], to their place in `data`, the buffer of the rank that gathers them."""
        itemsize, columns = self.piece.dtype.itemsize, self.span.columns
        piece = data[self.piece.offset :][: (self.piece.end - self.piece.first) * itemsize].view(self.span.rows, -1)
        piece[:, columns.start * itemsize : columns.stop * itemsize] = values.view(self.span.rows, -1)

    def values(self) -> Tensor:
        """The values as a flat tensor in the dtype in which the model holds them. To be called on the rank that holds
        them."""
        return self.piece.held.values(self.span.first, self.span.end)


def shares(bucket: Iterable[Piece], rank: int, owner: int) -> list[Share]:
    """The values of a bucket that `rank` sends to `owner`, which gathers it."""
    spans = ((piece, piece.held.span(piece.first, piece.end, rank, owner)) for piece in bucket)
    return [Share(piece, span) for piece, span in spans if span]


def gather_part(
    version: Version,
    tensors: Sequence[WeightTensor],
    dtype: torch.dtype | None = None,
    take: Callable[[int], Tensor] = empty_buffer,
) -> Snapshot:
    """This rank's part of the weights, on the CPU, in `dtype` (None: float32) but for tensors that have their own.
    Collective.

    `tensors`: from `DivisibleWeights`, in the same order on all ranks. `take`: function that returns a buffer of a
    size, uint8 [bytes].
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtypes = [each.held.dtype or dtype or torch.float32 for each in tensors]
    heads = [
        TensorHead(each.name, str(own).removeprefix("torch."), list(each.shape))
        for each, own in zip(tensors, dtypes, strict=True)
    ]
    owners = divide(heads, ranks, [each.held.holders(each.first, each.end) for each in tensors])
    gathered: list[list[list[Piece]]] = []
    for each in range(ranks):
        members = [i for i, owner in enumerate(owners) if owner == each]
        offsets, size = layout([heads[i] for i in members])
        divided = (pieces(tensors[i], dtypes[i], offset) for i, offset in zip(members, offsets, strict=True))
        gathered.append(list(in_buckets(chain.from_iterable(divided))))
        if each == rank:
            own_heads, data = [heads[i] for i in members], take(size)
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
    return snapshot_of(version, own_heads, data)


def pieces(each: WeightTensor, dtype: torch.dtype, offset: int) -> Iterator[Piece]:
    """The tensor `each` in pieces of whole rows or a part of one row. A piece has at most `BUCKET_BYTES` in float32, in
    which merged weights are computed. `dtype`: in which it is gathered. `offset`: position of the tensor in the buffer
    of the rank that gathers it, bytes."""
    first, row = each.first, each.held.row
    while first < each.end:
        size = min(BUCKET_BYTES // torch.float32.itemsize, each.end - first)
        if size > (left := row - first % row):
            size = left if left < row else size // row * row
        yield Piece(each.held, dtype, first, first + size, offset + (first - each.first) * dtype.itemsize)
        first += size


def in_buckets(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Divide the pieces, in their order, into buckets of at most `BUCKET_BYTES` or one piece."""
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
    """Memory for the messages of one bucket at a time, reused by the next bucket once this one has arrived. New
    allocations for each message would fragment the memory of the process."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, messages: list[list[Share]]) -> list[Tensor]:
        """A part of the memory for each message, a list of shares: uint8 [bytes of the shares one after the other, each
        aligned]."""
        sizes = [sum(aligned(share.size) for share in its) for its in messages]
        if messages and self._bytes.numel() < sum(sizes):
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=messages[0][0].piece.held.device)
        return list(self._bytes[: sum(sizes)].split(sizes)) if messages else []


class Transfer:
    """A bucket on its way from the ranks that hold its values to the rank that gathers it."""

    def __init__(self, bucket: list[Piece], owner: int, data: Tensor, memory: MessageMemory):
        """Start to send this rank's values of the bucket to rank `owner` or, on that rank, to receive the others' into
        its buffer `data`. Collective."""
        self.data, rank = data, dist.get_rank()
        self.received: list[tuple[list[Share], Tensor]] = []
        """On rank `owner`, for each other rank that holds values of the bucket: (the shares that it sends, the message,
        uint8, in which they arrive). Empty on other ranks."""
        operations = []
        if rank != owner and (own := shares(bucket, rank, owner)):
            (message,) = memory.take([own])
            fill(message, own)
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
                share.write(data, share.values().to(share.piece.dtype).contiguous().view(torch.uint8))

    def finish(self) -> None:
        """Wait until this rank's values are sent or, on the rank that gathers, until those of all other ranks are in
        its buffer."""
        for work in self.works:
            work.wait()
        for its, message in self.received:
            for share, sent in zip(its, message.split([aligned(share.size) for share in its]), strict=True):
                share.write(self.data, sent[: share.size])


def fill(message: Tensor, own: list[Share]) -> None:
    """Write this rank's values of a bucket, its shares `own`, one after the other into their message, uint8."""
    for share, place in zip(own, message.split([aligned(share.size) for share in own]), strict=True):
        place[: share.size].view(share.piece.dtype).copy_(share.values())


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
