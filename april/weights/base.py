"""The base model's weights as stored in its folder, and their merge with a trained adapter.

A run that trains an adapter publishes only the trained tensors. A worker with the same base model merges them into its
weights itself; for other workers the learner does so. Both use `merge`, which computes in fp32.

base = BaseWeights(folder)
weights = dict(base.with_adapter(adapter, tensors))         # the complete weights of a version
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from april.util.files import weight_files
from april.weights.canary import Canary
from april.weights.channel import Adapter, TensorHead
from april.weights.snapshot import DTYPES, Snapshot, checksums_in_server, pack_each, unpack
from april.wire.message import Version

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

    def only(self, names: Iterable[str]) -> "BaseWeights":
        """The base model restricted to the tensors of these names."""
        some = BaseWeights(self.folder)
        some.tensors = {name: self.tensors[name] for name in names}
        return some

    def merged(
        self, version: Version, adapter: Adapter, trained: Mapping[str, Tensor], canary: Canary | None = None
    ) -> Snapshot:
        """All weights of a version as a packed snapshot; each tensor is merged just before it is packed. `trained`: the
        version's trained tensors; `canary`: stored in the snapshot, None for none."""
        named = (
            (name, tensor) for name, tensor in self.tensors.items() if name in trained or name not in adapter.without
        )
        heads = [TensorHead(name, adapter.dtype, list(tensor.shape)) for name, tensor in named]
        return pack_each(version, heads, (tensor for _, tensor in self.with_adapter(adapter, trained)), canary)

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


class PartMerger:
    """Merges one rank's part of the complete weights of a version, from the base model and trained tensors. Every rank
    of the learner has the base model's files; rank 0 sends it the trained tensors that its part needs."""

    def __init__(self, base: BaseWeights, names: Sequence[Sequence[str]], has_checksums: bool):
        """`names`: for each rank, in order, the names of the tensors that it merges. `has_checksums`: whether to
        compute the checksums that the tensors will have in an inference server."""
        self.base, self.names, self.has_checksums = base, names, has_checksums

    def trained_for(self, rank: int, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the `trained` tensors that the rank needs to merge its part."""
        own = {name for whole in self.names[rank] for name in with_parts(whole)}
        return {name: tensor for name, tensor in trained.items() if name in own}

    def merged(self, rank: int, version: Version, adapter: Adapter, trained: Mapping[str, Tensor]) -> Snapshot:
        """The part of a version's complete weights that the rank merges, from the base model and the `trained`
        tensors."""
        part = self.base.only(self.names[rank]).merged(version, adapter, trained)
        checksums = checksums_in_server(unpack(part.heads, part.data)) if self.has_checksums else {}
        return replace(part, server_checksums=checksums)


def with_parts(name: str) -> tuple[str, str, str]:
    """Names of the trained tensors that may change the weight `name`: `name` itself if it is trained whole, else its
    adapter's A and B."""
    layer = name.removesuffix(".weight")
    return name, f"{layer}.{DOWN}", f"{layer}.{UP}"


def merge(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """W + scaling B A in fp32 (LoRA, arXiv 2106.09685, eq. 3).

    `weight` W [out, in], `down` A [rank, in], `up` B [out, rank]. Rows may be a subset, the same in `weight` and `up`.
    """
    return (up @ down).mul_(scaling).add_(weight)
