"""A model as it lies in its folder, and the weights that an adapter of it makes.

Where an adapter is trained, what is trained alone is published. A worker that has the same model makes the weights of
both, and so does the learner for a lane that wants them made. `merge` is the one place where that is computed, in fp32.

base = Base(folder)
weights = dict(base.with_adapter(adapter, tensors))         # all of a version, as one without an adapter has them
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from april.weights.lane_messages import Adapter
from april.weights.snapshot import DTYPES

DOWN, UP = "lora_A", "lora_B"
"""last parts of the names of an adapter's tensors, where the layer's own has `weight`"""


@dataclass(frozen=True)
class Adapted:
    """A version of a model whose adapter is trained."""

    tensors: Mapping[str, Tensor]
    """what is, fp32: A [rank, in] and B [out, rank] of layers, and weights that are trained whole, by the names that
    the model's files have"""
    adapter: Adapter
    base: "Base"


class Base:
    """The tensors of a Hugging Face folder. They are mapped, not read: memory is the files'."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """By name; none where the folder has no safetensors."""
        found: dict[str, Tensor] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found

    @cached_property
    def checksum(self) -> str:
        """Of names, types, shapes and bytes of all, however they lie in files; empty where there are none."""
        total = 0
        for name, tensor in sorted(self.tensors.items()):
            total = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
            total = crc32(tensor.reshape(-1).view(torch.uint8).numpy(), total)
        return f"{total:08x}" if self.tensors else ""

    def with_adapter(self, adapter: Adapter, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All weights of a version, on the CPU in `adapter.dtype`, as they are asked for. What is not trained may be
        the very tensor of the file."""
        dtype, left_out = DTYPES[adapter.dtype], set(adapter.without)
        for name, own in self.tensors.items():
            layer = name.removesuffix(".weight")
            if name in trained:
                yield name, trained[name].to(dtype)
            elif f"{layer}.{DOWN}" in trained:
                down, up = (trained[f"{layer}.{part}"] for part in (DOWN, UP))
                yield name, merge(own, down, up, adapter.scaling).to(dtype)
            elif name not in left_out:
                yield name, own.to(dtype)


def merge(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """W + scaling B A, fp32: the weight [out, in] of a layer, or some of its rows and of B's, with all of its A
    [rank, in]."""
    return (up @ down).mul_(scaling).add_(weight)
