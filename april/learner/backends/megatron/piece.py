"""Hugging Face tensors stored in Megatron's parameters: reading from files, publishing and checkpoints.

Most tensors are a part of one parameter. Experts are separate modules in Megatron's model and stacked in one tensor in
transformers' model; files name each expert, with gate and up projection separate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from april.learner.backends.megatron.layout import SHARES
from april.learner.held_tensors import of_local
from april.learner.loading import ModelError, WeightFiles, check_shape
from april.learner.model import shard_shape

ROWS, COLUMNS = 0, 1
SPLIT_DIM = 2
"""Dimension of a stack of experts (as `StackedExperts.unfold` gives it) along which every expert is split over ranks:
rows of the gate and up projections, columns of the down projection."""


class Sharding(NamedTuple):
    """Shape of a tensor, and how the ranks of a pipeline stage divide it. The ranks of a stage tell this to other
    stages."""

    shape: tuple[int, ...]
    dim: int
    shares: int
    """Number of ranks that divide a copy of the tensor along `dim`."""


@dataclass(frozen=True, eq=False)
class MappedTensor:
    """A Hugging Face tensor stored in Megatron's parameters: a part of one parameter, or several stacked.

    Its methods convert tensors shaped like the parameters: the parameters themselves, gradients or moments.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    whole: Tensor
    """The full Hugging Face tensor, on the meta device."""
    dim: int | None
    """Dimension along which the tensor is sharded; None: replicated."""
    mesh: DeviceMesh
    """Mesh of the ranks that hold the tensor: its dimension REPLICAS has a copy of the tensor at each place, its
    dimension SHARES the ranks that divide a copy."""
    view: Callable[[Tensor], Tensor]
    """Function of a tensor shaped like the parameter: returns the view of it that is this rank's shard. The view may
    have more dimensions than the shard."""

    def to_hugging_face(self, tensors: Sequence[Tensor]) -> DTensor:
        """The Hugging Face tensor whose values are in `tensors`, which are shaped like the parameters. It is sharded,
        and shares the memory of `tensors` or is a copy. Collective."""
        (tensor,) = tensors
        return self.sharded(self.view(tensor.detach()))

    @torch.no_grad()
    def from_hugging_face(self, tensors: Sequence[Tensor], own: Tensor) -> None:
        """Copy `own`, this rank's shard of the Hugging Face tensor, into `tensors`. Collective."""
        (tensor,) = tensors
        view = self.view(tensor)
        if own.data_ptr() != view.data_ptr():  # equal if `own` is that view
            view.copy_(own.reshape(view.shape))

    def sharded(self, own: Tensor) -> DTensor:
        own = own.reshape(self.own_shape)
        if own.storage_offset():
            own = own.clone()  # torch's checkpoint writer misreads a sharded tensor with a storage offset
        placements = [Replicate(), Replicate() if self.dim is None else Shard(self.dim)]
        shape, stride = self.whole.shape, self.whole.stride()
        return DTensor.from_local(own, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    @property
    def own_shape(self) -> list[int]:
        return shard_shape(self.whole.shape, self.dim, self.mesh.get_local_rank(SHARES), self.mesh[SHARES].size())

    @property
    def sharding(self) -> Sharding:
        """How the ranks of this stage hold the tensor."""
        return Sharding(tuple(self.whole.shape), self.dim or 0, 1 if self.dim is None else self.mesh[SHARES].size())

    def values(self, first: int, end: int) -> Tensor:
        """The values from `first` to `end` (exclusive) of this rank's shard, flat."""
        (parameter,) = self.parameters
        return of_local(self.view(parameter))(first, end)

    def read(self, files: WeightFiles) -> None:
        """Read this rank's shard from files into the parameter. Raises ModelError."""
        (own,) = read_local_parts(files, {self.name: self.whole}, self.dim, self.mesh)
        self.from_hugging_face(self.parameters, own)


def read_local_parts(
    files: WeightFiles, wholes: dict[str, Tensor], dim: int | None, mesh: DeviceMesh
) -> Iterator[Tensor]:
    """This rank's shards along `dim` of tensors in files, in the order of `wholes`, which has their names and meta
    tensors. Raises ModelError."""
    if lacking := [name for name in wholes if name not in files.path_of]:
        raise ModelError(f"{files.folder}: its weights lack {lacking[0]}; give a whole Hugging Face folder")
    ranks, rank = mesh[SHARES].size(), mesh.get_local_rank(SHARES)
    for name, found in files.slices(wholes).items():
        shape = wholes[name].shape
        check_shape(files, name, found.get_shape(), wholes[name].shape)
        if dim is None:
            yield found[...]
        else:
            first = rank * -(-shape[dim] // ranks)
            span = slice(first, first + shard_shape(shape, dim, rank, ranks)[dim])
            yield found[span] if dim == ROWS else found[:, span]


@dataclass(frozen=True, eq=False)
class StackedExperts(MappedTensor):
    """One or two stacked projections of all experts; the parameters are those of this rank's experts.

    If every expert is split over the ranks, the ranks exchange shards so that each has some experts whole.
    """

    kinds: Sequence[str]
    """Names of the projections in files, in the order of their rows."""
    is_split: bool
    """Whether every expert is split over the ranks."""

    def to_hugging_face(self, tensors: Sequence[Tensor]) -> DTensor:
        own = torch.stack([tensor.detach() for tensor in tensors])
        return self.sharded(self.reshard(self.unfold(own), SPLIT_DIM, ROWS) if self.is_split else own)

    @torch.no_grad()
    def from_hugging_face(self, tensors: Sequence[Tensor], own: Tensor) -> None:
        if self.is_split:
            own = self.reshard(self.unfold(own), ROWS, SPLIT_DIM)
        for tensor, value in zip(tensors, own, strict=True):
            tensor.copy_(value.reshape(tensor.shape))

    @property
    def sharding(self) -> Sharding:
        if not self.is_split:
            return super().sharding
        return Sharding(tuple(self.unfold(self.whole).shape), SPLIT_DIM, self.mesh[SHARES].size())

    def values(self, first: int, end: int) -> Tensor:
        size = self.parameters[0].numel()
        own = range(first // size, -(-end // size))
        parts = [of_local(self.parameters[i])(max(first - i * size, 0), min(end - i * size, size)) for i in own]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def unfold(self, stack: Tensor) -> Tensor:
        """A view of `stack`, whose two projections (gate and up) are stacked along the rows of each expert, as
        [experts, projections, rows, columns]; with one projection `stack` itself, [experts, rows, columns]."""
        return stack.unflatten(1, (len(self.kinds), -1)) if len(self.kinds) > 1 else stack

    def reshard(self, own: Tensor, before: int, after: int) -> Tensor:
        """Reshard an unfolded stack from dimension `before` to dimension `after`; returns this rank's shard.
        Collective."""
        whole = self.unfold(self.whole)
        shape, stride = whole.shape, whole.stride()
        placements = [[Replicate(), Shard(dim)] for dim in (before, after)]
        found = DTensor.from_local(own, self.mesh, placements[0], run_check=False, shape=shape, stride=stride)
        return found.redistribute(placements=placements[1]).to_local()

    @torch.no_grad()
    def read(self, files: WeightFiles) -> None:
        stem, _, _ = self.name.rpartition(".")
        count = len(self.parameters)
        first = 0 if self.is_split else self.mesh.get_local_rank(SHARES) * count
        names = [f"{stem}.{number}.{kind}.weight" for number in range(first, first + count) for kind in self.kinds]
        projection = self.whole[0].chunk(len(self.kinds))[0]
        dim = (ROWS if len(self.kinds) > 1 else COLUMNS) if self.is_split else None
        parts = read_local_parts(files, dict.fromkeys(names, projection), dim, self.mesh)
        for parameter in self.parameters:
            parameter.copy_(torch.cat([next(parts) for _ in self.kinds]))
