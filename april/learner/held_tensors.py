"""How the ranks hold a tensor of the model, and which of its values each rank sends to another.

held = HeldTensor.of(parameter)
span = held.span(first, end, rank, owner)       # what `rank` gives `owner` of the values from `first` to `end`
values = held.values(span.first, span.end)      # on `rank`
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from april.learner.model import sharded_dim
from april.weights.snapshot import DTYPES


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of a tensor, each divided among some ranks."""

    ranks: Sequence[Sequence[int]]
    """The ranks of each copy, in the order of their parts."""


@cache
def whole_on_each(ranks: int) -> Copies:
    """The `Copies` of a tensor of which each of `ranks` ranks has a whole copy."""
    return Copies([[rank] for rank in range(ranks)])


@cache
def copies_on(mesh: DeviceMesh, is_divided: bool) -> Copies:
    """The copies of a tensor on a mesh. With `is_divided` the ranks along the mesh's last dimension divide a copy among
    them; otherwise each rank has a whole copy."""
    return Copies(mesh.mesh.reshape(-1, mesh.shape[-1] if is_divided else 1).tolist())


@cache
def places(copies: Copies, owner: int) -> dict[int, int]:
    """For one copy of a tensor: the index of the part that each of its ranks holds, by rank. It is the copy from which
    the rank `owner` gets the tensor's values: one of which `owner` holds a part, or any other if it holds none."""
    own = (copy for copy in copies.ranks if owner in copy)
    copy = next(own, copies.ranks[owner % len(copies.ranks)])
    return {rank: place for place, rank in enumerate(copy)}


@dataclass(frozen=True)
class Span:
    """Consecutive values of a tensor that one rank sends to another: their range among all values that the sender
    holds, and their rows and columns in the piece (whole rows, or a part of one row) that the receiver gathers."""

    first: int
    """Index of the first value among all values of the tensor that the sender holds."""
    end: int
    rows: int
    columns: slice
    """Columns that the values take in each of the `rows` rows of the piece that the receiver gathers."""


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor as the ranks hold it. Each copy is divided along the dimension `dim`, which has n indices, among R
    ranks: the r-th of them holds the r-th block of `ceil(n / R)` indices. Values are in the order of the flattened
    tensor."""

    shape: torch.Size
    copies: Copies
    values: Callable[[int, int], Tensor]
    """Function (first, end) -> the values from index `first` to `end` (exclusive) of all those that this rank holds,
    flat."""
    device: torch.device
    dim: int = 0
    dtype: torch.dtype | None = None
    """Dtype in which the tensor is sent; None: that of the version."""

    @classmethod
    def of(cls, tensor: Tensor) -> Self | None:
        """The `HeldTensor` of a parameter or buffer; one that is not sharded is sent in its own dtype. None if that
        dtype cannot be sent (`april.weights.snapshot.DTYPES`), or if the tensor is sharded over another dimension of
        its mesh than the last."""
        if not isinstance(tensor, DTensor):
            copies, is_known = whole_on_each(dist.get_world_size()), tensor.dtype in DTYPES.values()
            return cls(tensor.shape, copies, of_local(tensor), tensor.device, 0, tensor.dtype) if is_known else None
        return cls.sharded(tensor, tensor.shape, of_local(tensor.to_local()))

    @classmethod
    def sharded(cls, like: DTensor, shape: torch.Size, values: Callable[[int, int], Tensor]) -> Self | None:
        """The `HeldTensor` of a tensor of `shape` that is sharded in the same way as `like`. `values`: function (first,
        end) -> the values from index `first` to `end` (exclusive) of all those that this rank holds, flat. None if
        `like` is sharded over another dimension of its mesh than the last."""
        *others, _ = like.placements
        dim = sharded_dim(like)
        if not all(placement.is_replicate() for placement in others):
            return None
        copies = copies_on(like.device_mesh, dim is not None)
        return cls(shape, copies, values, like.to_local().device, dim or 0)

    @property
    def row(self) -> int:
        """Number of values of a row: the product of the tensor's sizes from the divided dimension on. A tensor that is
        divided along its first dimension is one row."""
        return math.prod(self.shape[self.dim :])

    def part(self, parts: int) -> tuple[int, int]:
        """(most values of a row that one rank holds if `parts` ranks divide the tensor, number of values of a row)."""
        return -(-self.shape[self.dim] // parts) * math.prod(self.shape[self.dim + 1 :]) if self.shape else 1, self.row

    def span(self, first: int, end: int, rank: int, owner: int) -> Span | None:
        """The values that `rank` sends to `owner`, out of those from `first` to `end` (exclusive) of the flattened
        tensor, which are a part of one row or whole rows; None if it sends none."""
        ranks = places(self.copies, owner)
        if rank not in ranks:
            return None
        each, row = self.part(len(ranks))
        low, high = (min(place * each, row) for place in (ranks[rank], ranks[rank] + 1))
        number, begin = divmod(first, row)
        rows = max(1, (end - first) // row)
        left, right = (low, high) if rows > 1 else (max(low, begin), min(high, begin + end - first))
        if left >= right:
            return None
        held = number * (high - low) + left - low
        return Span(held, held + rows * (right - left), rows, slice(left - begin, right - begin))

    def holders(self, first: int, end: int) -> Collection[int]:
        """The ranks that each hold all values from `first` to `end` (exclusive); none if there are no values."""
        if first == end:
            return ()
        each, row = self.part(len(self.copies.ranks[0]))
        begin, last = first % row, first % row + end - first - 1
        place, last_place = (begin // each, last // each) if last < row else (0, (row - 1) // each)
        return [copy[place] for copy in self.copies.ranks] if place == last_place else ()


def of_local(local: Tensor) -> Callable[[int, int], Tensor]:
    """The function `HeldTensor.values` of a tensor of which this rank holds `local`; the values have no autograd graph.
    If `local` is a view, at most the requested rows are copied."""
    held = local.detach() if local.ndim else local.detach().reshape(1)
    return partial(values_of_rows, held.__getitem__, math.prod(held.shape[1:]))


def values_of_rows(rows: Callable[[slice], Tensor], columns: int, first: int, end: int) -> Tensor:
    """The values from `first` to `end` (exclusive) of a flattened tensor with `columns` values in each row; `rows`
    returns a slice of its rows."""
    start = first // columns
    found = rows(slice(start, -(-end // columns)))
    return found.reshape(-1)[first - start * columns : end - start * columns]
