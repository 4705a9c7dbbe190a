"""Layers that carry a state from token to token (state spaces, gated delta nets, linear attention, short convolutions),
exact for packed sequences: such a mixer is called once a sequence, on its slice of the row.

A mixer is found by its structure, not by a model's name: within a layer, a module that convolves, or that takes a cache
although nothing in it attends through transformers' interface. A layer that mixes tokens in another way is found when
the model is compared with transformers' (`april/learner/policy`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from april.learner.attention import PackedAttentionError
from april.learner.attention_kernels import Packing

CACHES = frozenset(("cache", "past_key_values", "past_key_value", "layer_past", "cache_params", "state"))
"""Names of the arguments through which transformers' modules take a cache or state."""
ATTENTION = "ALL_ATTENTION_FUNCTIONS"
"""Name of transformers' registry of attention functions. A module whose code refers to this name attends by a function
of that registry."""


class Row:
    """The packed row that a model computes; the model's mixers share this object, and find in it where the sequences
    lie."""

    def __init__(self) -> None:
        self.parts: list[Packing] = []
        """For each sequence of the row, the packing of that sequence alone."""

    def take(self, body: nn.Module, arguments: tuple, options: Mapping[str, Any]) -> None:
        """Hook before the forward pass of a model's body: takes the sequences from `packing` among the keyword
        arguments `options`."""
        if packing := options.get("packing"):
            starts = packing.cu_seq_lens
            self.parts = [Packing([n], starts[i : i + 2] - starts[i]) for i, n in enumerate(packing.seq_lens)]

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Contexts for activation checkpointing: of the forward pass, and of its recomputation, which must see the row
        of that forward pass instead of the latest."""
        return nullcontext(), self.again(self.parts)

    @contextmanager
    def again(self, parts: list[Packing]) -> Iterator[None]:
        current, self.parts = self.parts, parts
        try:
            yield
        finally:
            self.parts = current

    def each_sequence(self, mixer: nn.Module) -> Callable:
        """The forward pass of a mixer, once a sequence: every tensor with a dimension of the row's length is sliced
        along it, and results of a sequence's length are put together."""
        forward, attends = with_buffers_alike(mixer), any(map(uses_attention, mixer.modules()))

        @torch.compiler.disable
        def by_sequence(*arguments: Any, **options: Any) -> Any:
            if not attends:
                options.pop("packing", None)
            lengths = [part.longest for part in self.parts]
            if len(lengths) == 1:
                return forward(*arguments, **options)
            leaves, form = pytree.tree_flatten((arguments, options))
            dims = [row_dimension(leaf, sum(lengths)) for leaf in leaves]
            if all(dim is None for dim in dims):
                raise PackedAttentionError(f"{type(mixer).__name__} was passed nothing of the row's length")
            sliced = [
                [leaf] * len(lengths) if dim is None else leaf.split(lengths, dim)
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            results = []
            for part, values in zip(self.parts, zip(*sliced, strict=True), strict=True):
                own, named = pytree.tree_unflatten(
                    [part if isinstance(value, Packing) else value for value in values], form
                )
                results.append(pytree.tree_flatten(forward(*own, **named)))
            together = [joined(values, lengths) for values in zip(*(result[0] for result in results), strict=True)]
            return pytree.tree_unflatten(together, results[0][1])

        return by_sequence


def with_buffers_alike(mixer: nn.Module) -> Callable:
    """The forward pass of a mixer, wrapped so that its persistent buffers, such as MiniMax's decays, have the dtype of
    its weights while it runs, as transformers loads them. At other times they keep the values and dtype of the
    files."""
    forward, saved = mixer.forward, mixer.state_dict().keys()
    buffers = [name for name, each in mixer.named_buffers(recurse=False) if name in saved and each.is_floating_point()]

    def converted(*arguments: Any, **options: Any) -> Any:
        kept, dtype = {name: getattr(mixer, name) for name in buffers}, next(mixer.parameters()).dtype
        try:
            for name, buffer in kept.items():
                setattr(mixer, name, buffer.to(dtype))
            return forward(*arguments, **options)
        finally:
            for name, buffer in kept.items():
                setattr(mixer, name, buffer)

    return converted if buffers else forward


def row_dimension(value: Any, length: int) -> int | None:
    """Index of the dimension of `value` whose size is the packed row's `length`: dimension 1 (as in [1, T, ...]), or
    else the first one. None if there is none, or if `value` is no tensor."""
    if not isinstance(value, Tensor):
        return None
    return next(
        (dim for dim in sorted(range(value.ndim), key=lambda dim: dim != 1) if value.shape[dim] == length), None
    )


def joined(values: tuple, lengths: list[int]) -> Any:
    """Results of all sequences, concatenated along the dimension whose sizes are `lengths` (tokens of each). Results
    without such a dimension, or that are no tensors, cannot be concatenated: the last one stands for all."""
    if not all(isinstance(value, Tensor) for value in values):
        return values[-1]
    for dim in sorted(range(values[0].ndim), key=lambda dim: dim != 1):
        if [value.shape[dim] for value in values] == lengths:
            return torch.cat(values, dim)
    return values[-1]


def split_mixers(body: nn.Module) -> None:
    """Change a model's body in place, so that it calls each mixer (a module that carries a state from token to token)
    once for each sequence of a packed row. The caller passes the body the keyword argument `packing`, which says where
    the sequences lie."""
    if found := [mixer for layer in getattr(body, "layers", ()) for mixer in mixers_in(layer)]:
        body.packed_row = Row()
        body.register_forward_pre_hook(body.packed_row.take, with_kwargs=True)
    for mixer in dict.fromkeys(found):  # layers may share one
        mixer.forward = body.packed_row.each_sequence(mixer)


def mixers_in(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost mixers (modules that carry a state from token to token) inside a module."""
    for child in module.children():
        if carries_state(child):
            yield child
        else:
            yield from mixers_in(child)


def carries_state(module: nn.Module) -> bool:
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return True
    if uses_attention(module) and "arange" in unwrap(type(module).forward).__code__.co_names:
        return True  # it counts the row's tokens itself, as Llama 4 for the temperature of its attention
    takes_cache = not CACHES.isdisjoint(signature(unwrap(type(module).forward)).parameters)
    return takes_cache and not any(map(uses_attention, module.modules()))


def uses_attention(module: nn.Module) -> bool:
    """Whether a module attends through transformers' interface, which packed attention is a function of."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and ATTENTION in code.co_names
