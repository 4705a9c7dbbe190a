"""A tensor of a Hugging Face model in Megatron's parameters: read from files, published, and in checkpoints.

Most are a part of one parameter. Experts are modules of their own in Megatron's model, and stacked in one tensor in
that of transformers; files name each, gate and up projection apart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from april.learner.backends.megatron.layout import SHARES
from april.learner.loading import Files, ModelError, check_shape
from april.learner.model import shape_of_part

ROWS, COLUMNS = 0, 1
CUT = 2
"""dimension of an unfolded stack along which ranks have parts of every expert: gate and up projection are cut in rows,
what follows them in columns"""


@dataclass(frozen=True, eq=False)
class Piece:
    """A Hugging Face tensor in Megatron's parameters: of one of them it is a part, of several what they are together.

    What its methods take and give are tensors like the parameters, such as these themselves, gradients or moments.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    whole: Tensor
    """of which they are a rank's part: a tensor without memory"""
    dim: int | None
    """along which the ranks have parts of it; None: each has all"""
    mesh: DeviceMesh
    """of REPLICAS and SHARES"""
    view: Callable[[Tensor], Tensor]
    """what a tensor like the parameter has of it on this rank, in place; its shape may have more dimensions"""

    def of(self, tensors: Sequence[Tensor]) -> DTensor:
        """A copy of this rank's part, or that itself. Collective."""
        (tensor,) = tensors
        return self.sharded(self.view(tensor.detach()))

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor], own: Tensor) -> None:
        """Make `own`, this rank's part, what they have of it. Collective."""
        (tensor,) = tensors
        view = self.view(tensor)
        if own.data_ptr() != view.data_ptr():  # otherwise it is that itself
            view.copy_(own.reshape(view.shape))

    def sharded(self, own: Tensor) -> DTensor:
        own = own.reshape(self.own_shape)
        if own.storage_offset():
            own = own.clone()  # torch's writer of checkpoints takes a sharded tensor with an offset for one in memory
        placements = [Replicate(), Replicate() if self.dim is None else Shard(self.dim)]
        shape, stride = self.whole.shape, self.whole.stride()
        return DTensor.from_local(own, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    @property
    def own_shape(self) -> list[int]:
        return shape_of_part(self.whole.shape, self.dim, self.mesh.get_local_rank(SHARES), self.mesh[SHARES].size())

    def read(self, files: Files) -> None:
        """This rank's part of it, into the parameter. Raises ModelError."""
        (own,) = read_parts(files, {self.name: self.whole}, self.dim, self.mesh)
        self.put(self.parameters, own)


def read_parts(files: Files, wholes: dict[str, Tensor], dim: int | None, mesh: DeviceMesh) -> Iterator[Tensor]:
    """Of tensors in files, such as `wholes` without memory, the parts along `dim` that this rank has, in their order.
    Raises ModelError."""
    if lacking := [name for name in wholes if name not in files.path_of]:
        raise ModelError(f"{files.folder}: its weights lack {lacking[0]}; give a whole Hugging Face folder")
    ranks, rank = mesh[SHARES].size(), mesh.get_local_rank(SHARES)
    for name, found in files.slices(wholes).items():
        shape = wholes[name].shape
        check_shape(files, name, found.get_shape(), wholes[name])
        if dim is None:
            yield found[...]
        else:
            first = rank * -(-shape[dim] // ranks)
            span = slice(first, first + shape_of_part(shape, dim, rank, ranks)[dim])
            yield found[span] if dim == ROWS else found[:, span]


@dataclass(frozen=True, eq=False)
class Stack(Piece):
    """Of a projection of all experts, or of two; the parameters are those of the experts that this rank has.

    Where ranks have a part of every expert they exchange them, and each has some experts whole then.
    """

    kinds: Sequence[str]
    """by which files name what an expert has of it, in the order of rows"""
    is_cut: bool
    """ranks have a part of every expert"""

    def of(self, tensors: Sequence[Tensor]) -> DTensor:
        own = torch.stack([tensor.detach() for tensor in tensors])
        return self.sharded(self.exchanged(self.unfolded(own), CUT, ROWS) if self.is_cut else own)

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor], own: Tensor) -> None:
        if self.is_cut:
            own = self.exchanged(self.unfolded(own), ROWS, CUT)
        for tensor, value in zip(tensors, own, strict=True):
            tensor.copy_(value.reshape(tensor.shape))

    def unfolded(self, stack: Tensor) -> Tensor:
        """[experts, projections, rows, columns] of two projections, [experts, rows, columns] of one."""
        return stack.unflatten(1, (len(self.kinds), -1)) if len(self.kinds) > 1 else stack

    def exchanged(self, own: Tensor, before: int, after: int) -> Tensor:
        """This rank's part of an unfolded stack along `after`, of those along `before`. Collective."""
        whole = self.unfolded(self.whole)
        shape, stride = whole.shape, whole.stride()
        placements = [[Replicate(), Shard(dim)] for dim in (before, after)]
        found = DTensor.from_local(own, self.mesh, placements[0], run_check=False, shape=shape, stride=stride)
        return found.redistribute(placements=placements[1]).to_local()

    @torch.no_grad()
    def read(self, files: Files) -> None:
        stem, _, _ = self.name.rpartition(".")
        count = len(self.parameters)
        first = 0 if self.is_cut else self.mesh.get_local_rank(SHARES) * count
        names = [f"{stem}.{number}.{kind}.weight" for number in range(first, first + count) for kind in self.kinds]
        one = self.whole[0].chunk(len(self.kinds))[0]
        dim = (ROWS if len(self.kinds) > 1 else COLUMNS) if self.is_cut else None
        parts = read_parts(files, dict.fromkeys(names, one), dim, self.mesh)
        for parameter in self.parameters:
            parameter.copy_(torch.cat([next(parts) for _ in self.kinds]))
