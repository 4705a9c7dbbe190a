"""The base model's weights as stored in its folder, and their merge with a trained adapter.

A run that trains an adapter publishes only the trained tensors. A worker with the same base model merges them into its
weights itself; for other workers the learner does so. Both use `merge`, which computes in fp32.

base = BaseWeights(folder)
weights = dict(base.with_adapter(adapter, tensors))         # the complete weights of a version
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from april.util.files import weight_files
from april.weights.channel import Adapter
from april.weights.snapshot import DTYPES, Snapshot, pack, unpack

DOWN, UP = "lora_A", "lora_B"
"""Last components of the names of an adapter's two tensors (A and B); the adapted layer's own tensor ends in
`weight`."""


@dataclass(frozen=True)
class AdapterWeights:
    """One version of the weights in a run that trains an adapter: base model and trained tensors."""

    tensors: Mapping[str, Tensor]
    """Trained tensors, fp32, by their names in the model's files: A [rank, in] and B [out, rank] of each adapted layer,
    and tensors that are trained whole."""
    adapter: Adapter
    base: "BaseWeights"


class BaseWeights:
    """The tensors of a Hugging Face model folder, memory-mapped rather than read."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name; empty if the folder has no safetensors files."""
        found: dict[str, Tensor] = {}
        for file in weight_files(self.folder):
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found

    @cached_property
    def checksum(self) -> str:
        """Crc32 (hexadecimal) of all tensors' names, dtypes, shapes and bytes, independent of their division into
        files; "" without tensors."""
        total = 0
        for name, tensor in sorted(self.tensors.items()):
            total = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
            total = crc32(tensor.reshape(-1).view(torch.uint8).numpy(), total)
        return f"{total:08x}" if self.tensors else ""

    def with_adapter(self, adapter: Adapter, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights of a version, on the CPU in `adapter.dtype`. An untrained tensor may be memory-mapped, not
        copied."""
        dtype, omitted = DTYPES[adapter.dtype], set(adapter.without)
        for name, base in self.tensors.items():
            layer = name.removesuffix(".weight")
            if name in trained:
                yield name, trained[name].to(dtype)
            elif f"{layer}.{DOWN}" in trained:
                down, up = (trained[f"{layer}.{part}"] for part in (DOWN, UP))
                yield name, merge(base, down, up, adapter.scaling).to(dtype)
            elif name not in omitted:
                yield name, base.to(dtype)


class MergedSnapshots:
    """The complete weights of the latest version that trains an adapter, merged once for all that need them."""

    base: BaseWeights | None = None
    """Base model of the adapter."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._latest: Snapshot | None = None

    def of(self, snapshot: Snapshot) -> Snapshot:
        """The complete weights of a snapshot; itself if it has no adapter."""
        if snapshot.adapter is None or self.base is None:
            return snapshot
        with self._making:
            if self._latest is None or self._latest.version != snapshot.version:
                trained = unpack(snapshot.heads, snapshot.data)
                merged = dict(self.base.with_adapter(snapshot.adapter, trained))
                self._latest = pack(snapshot.version, merged, snapshot.canary)
            return self._latest


def merge(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """W + scaling B A in fp32 (LoRA, arXiv 2106.09685, eq. 3).

    `weight` W [out, in], `down` A [rank, in], `up` B [out, rank]. Rows may be a subset, the same in `weight` and `up`.
    """
    return (up @ down).mul_(scaling).add_(weight)
