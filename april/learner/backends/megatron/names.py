"""Which part of which of Megatron's parameters each Hugging Face tensor is, and how both lie on the ranks.

Megatron has queries, keys and values of a layer in one matrix, group by group: the queries of a group, its key, its
value. It has gate and up projection in one, gate first on each rank. Ranks that share layers have rows of these, and
of embedding and head; columns of what follows them. All else is whole on each of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from april.learner.loading import Files, ModelError, check_shape
from april.learner.model import shape_of_part

ROWS, COLUMNS = 0, 1
REPLICAS, SHARES = "replicas", "shares"
"""dimensions of the mesh of ranks: those of SHARES have parts of a layer each"""
LAYER = "model.layers."


@dataclass(frozen=True, eq=False)
class Piece:
    """A Hugging Face tensor as a part of a parameter."""

    name: str
    parameter: nn.Parameter
    whole: Tensor
    """of which it is a rank's part: a tensor without memory"""
    dim: int | None
    """along which the ranks have parts of it; None: each has all"""
    mesh: DeviceMesh
    """of REPLICAS and SHARES"""
    view: Callable[[Tensor], Tensor]
    """what a tensor like the parameter has of it on this rank, in place; its shape may have more dimensions"""

    def of(self, tensor: Tensor) -> DTensor:
        """Of one like the parameter: a copy of this rank's part, or that itself."""
        own = self.view(tensor.detach()).reshape(self.own_shape)
        if own.storage_offset():
            own = own.clone()  # torch's writer of checkpoints takes a sharded tensor with an offset for one in memory
        placements = [Replicate(), Replicate() if self.dim is None else Shard(self.dim)]
        shape, stride = self.whole.shape, self.whole.stride()
        return DTensor.from_local(own, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def put(self, tensor: Tensor, own: Tensor) -> None:
        """Make `own`, this rank's part, what one like the parameter has of it."""
        view = self.view(tensor)
        if own.data_ptr() != view.data_ptr():  # otherwise it is that itself
            view.copy_(own.reshape(view.shape))

    @property
    def own_shape(self) -> list[int]:
        return shape_of_part(self.whole.shape, self.dim, self.mesh.get_local_rank(SHARES), self.mesh[SHARES].size())

    def read(self, files: Files) -> None:
        """This rank's part of it, into the parameter. Raises ModelError."""
        if self.name not in files.path_of:
            raise ModelError(f"{files.folder}: its weights lack {self.name}; give a whole Hugging Face folder")
        found = files.slices([self.name])[self.name]
        check_shape(files, self.name, found.get_shape(), self.whole)
        if self.dim is None:
            own = found[...]
        else:
            each = -(-self.whole.shape[self.dim] // self.mesh[SHARES].size())
            first = self.mesh.get_local_rank(SHARES) * each
            span = slice(first, first + self.own_shape[self.dim])
            own = found[span] if self.dim == ROWS else found[:, span]
        self.put(self.parameter, own)


def pieces(model: nn.Module, lm: nn.Module, mesh: DeviceMesh) -> Iterator[Piece]:
    """Of all tensors of `lm`, which has no memory, in a `GPTModel`. Raises ModelError for one without a place there."""
    parameters = dict(model.named_parameters())
    groups = lm.config.num_key_value_heads // mesh[SHARES].size()
    heads = (groups, 2 + lm.config.num_attention_heads // lm.config.num_key_value_heads, -1)
    places: dict[str, tuple[str, int | None, Callable[[Tensor], Tensor]]] = {
        "model.embed_tokens.weight": ("embedding.word_embeddings.weight", ROWS, whole),
        "model.norm.weight": ("decoder.final_layernorm.weight", None, whole),
        "lm_head.weight": ("output_layer.weight", ROWS, whole),
        "input_layernorm.weight": ("input_layernorm.weight", None, whole),
        "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", None, whole),
        "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", None, whole),
        "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", None, whole),
        "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", COLUMNS, whole),
        "mlp.gate_proj.weight": ("mlp.linear_fc1.weight", ROWS, gate),
        "mlp.up_proj.weight": ("mlp.linear_fc1.weight", ROWS, up),
        "mlp.down_proj.weight": ("mlp.linear_fc2.weight", COLUMNS, whole),
    }
    for kind in ("weight", "bias"):
        for name, of_group in (("q", queries), ("k", keys), ("v", values)):
            fused = f"self_attention.linear_qkv.{kind}"
            places[f"self_attn.{name}_proj.{kind}"] = (fused, ROWS, partial(of_group, heads))
    for name, tensor in lm.named_parameters():
        number, _, rest = name.removeprefix(LAYER).partition(".")
        in_layer = name.startswith(LAYER)
        place = places.get(rest if in_layer else name)
        found = place and parameters.get(f"decoder.layers.{number}.{place[0]}" if in_layer else place[0])
        if place is None or found is None:
            raise ModelError(f"{lm.config.name_or_path}: its {name} has no place in Megatron's model")
        _, dim, view = place
        if view is whole and dim == ROWS:
            view = partial(without_padding, own_rows(tensor, mesh))
        yield Piece(name, found, tensor, dim, mesh, view)


def own_rows(tensor: Tensor, mesh: DeviceMesh) -> int:
    """Of a vocabulary, which is padded to as many on each rank."""
    each = -(-len(tensor) // mesh[SHARES].size())
    return max(0, min(each, len(tensor) - mesh.get_local_rank(SHARES) * each))


def whole(tensor: Tensor) -> Tensor:
    return tensor


def without_padding(rows: int, tensor: Tensor) -> Tensor:
    return tensor[:rows]


def gate(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[0]


def up(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[1]


def queries(heads: tuple[int, int, int], tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, heads)[:, :-2]


def keys(heads: tuple[int, int, int], tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, heads)[:, -2]


def values(heads: tuple[int, int, int], tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, heads)[:, -1]
