"""Low-rank adapters: linear layers train a product B A beside a frozen weight (LoRA, arXiv 2106.09685, section 4.1).

Reading or publishing weights, an adapted model shows its original tensors with the adapter merged into them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from april.config import stored
from april.config.training import LoraSection, layers_to_adapt
from april.learner.frozen_base import BaseLinear, hold_frozen, local_part
from april.learner.held_tensors import HeldTensor, values_of_rows
from april.learner.loading import names_in_files
from april.learner.vision import text_model
from april.weights.base import DOWN, UP, merge

PARTS = (DOWN, UP)


class AdaptedLinear(BaseLinear):
    """Linear layer with a LoRA adapter: W x + b + scaling B A x, of which A [rank, in] and B [out, rank] are trained.
    The parameters W and b keep their names."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float, generator: torch.Generator):
        """A layer with the update B A: B starts at zero, so that the layer is unchanged at first; A is initialised as
        in peft and the paper's code."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)
        self.scaling, self.enabled = scaling, True

    def forward(self, x: Tensor) -> Tensor:
        """W x + b + scaling B A x. For speed the scaling is applied to A x, of size `rank`, and the result is added in
        place: on a CPU a third of the cost."""
        if not self.enabled:
            return super().forward(x)
        rows = x.flatten(0, -2)
        low_rank = self.scaling * F.linear(rows, self.lora_A)
        return super().forward(rows).addmm_(low_rank, self.lora_B.T).view(*x.shape[:-1], self.out_features)

    def merged(self) -> Tensor:
        """The weight with the adapter merged: W + scaling B A. Collective if sharded: each rank computes its own rows,
        from the whole of A."""
        return self.with_rows(self.merged_rows(self.whole_down(), slice(None)))

    def merged_rows(self, down: Tensor, rows: slice) -> Tensor:
        """Rows [n, in] of this rank's shard of the merged weight, in fp32. `down`: from `whole_down`."""
        return merge(self.plain_rows(rows), down, local_part(self.lora_B)[rows], self.scaling)

    def whole_down(self) -> Tensor:
        """The adapter's matrix A, [rank, in], whole on each rank. Collective if sharded."""
        down = self.lora_A.detach()
        return down.redistribute(placements=[Replicate()]).to_local() if isinstance(down, DTensor) else down


def attach(lm: nn.Module, section: LoraSection, seed: int) -> None:
    """Add an adapter to the chosen linear layers of `lm`, in place, and freeze everything else, except embedding and
    head with `lora.embedding`. The same seed gives the same adapter. Raises ConfigError for targets that `lm` does not
    have."""
    lm.requires_grad_(False)
    for table in (lm.get_input_embeddings(), lm.get_output_embeddings()) if section.embedding else ():
        table.weight.requires_grad_(True)
    hold_frozen(lm, section.base)
    layers = set(text_model(lm).layers.modules())
    linears = {  # not what computes more than that, such as the router of Llama 4
        name: module
        for name, module in lm.named_modules()
        if type(module) in (nn.Linear, BaseLinear) and module in layers
    }
    generator = torch.Generator().manual_seed(seed)
    for name in layers_to_adapt(linears, section):
        adapter = AdaptedLinear(linears[name], section.rank, section.alpha / section.rank, generator)
        lm.set_submodule(name, adapter)


def adapted_layers(lm: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: module for name, module in lm.named_modules() if isinstance(module, AdaptedLinear)}


def idle_layers(lm: nn.Module) -> list[str]:
    """Adapted layers whose adapter has no gradient after a backward pass: the model reads their weight without calling
    them, or has passed them no token."""
    return [name for name, layer in adapted_layers(lm).items() if layer.lora_A.grad is None is layer.lora_B.grad]


def merged_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's original parameters in fp32 with the adapter merged, computed lazily. Collective if sharded."""
    layers = {f"{name}.weight": layer for name, layer in lm.named_modules() if isinstance(layer, BaseLinear)}
    for name, parameter in lm.named_parameters():
        if layer := layers.get(name):
            yield name, layer.merged() if isinstance(layer, AdaptedLinear) else layer.plain_weight()
        elif not name.endswith(PARTS):
            yield name, parameter if parameter.dtype == torch.float32 else parameter.detach().float()


def held_weights(lm: nn.Module) -> Iterator[tuple[str, HeldTensor | None]]:
    """The model's original parameters as the ranks hold them, the adapter merged: each rank computes the rows that are
    asked for. Collective if sharded: every rank has the whole of each A from then on."""
    layers = {f"{name}.weight": layer for name, layer in lm.named_modules() if isinstance(layer, BaseLinear)}
    for name, parameter in lm.named_parameters():
        if layer := layers.get(name):
            adapted = isinstance(layer, AdaptedLinear)
            rows = partial(layer.merged_rows, layer.whole_down()) if adapted else layer.plain_rows
            shape = torch.Size([len(parameter), layer.in_features])
            yield name, HeldTensor.sharded(parameter, shape, partial(values_of_rows, rows, layer.in_features))
        elif not name.endswith(PARTS):
            yield name, HeldTensor.of(parameter)


def names_in_folder(lm: nn.Module, trained: Iterable[str]) -> dict[str, str] | None:
    """Names in Hugging Face files of the adapted layers' weights and of the tensors trained whole, by their names in
    `lm`; `trained` has the names of all trained parameters. None if some of these weights have another form in files.
    """
    weights = [f"{name}.weight" for name in adapted_layers(lm)] + [name for name in trained if not name.endswith(PARTS)]
    return names_in_files(lm, {name: lm.get_parameter(name).shape for name in weights})


def published_tensors(trained: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Trained tensors by the names under which they are published. A tensor that is trained whole has its name in the
    model's files. A and B of an adapted layer have the layer's name in the files, and their own last component.
    `names`: from `names_in_folder`."""
    found = {}
    for name, tensor in trained.items():
        layer, _, part = name.rpartition(".")
        if part in PARTS:
            found[f"{names[f'{layer}.weight'].removesuffix('.weight')}.{part}"] = tensor
        else:
            found[names[name]] = tensor
    return found


class WithoutAdapter(nn.Module):
    """The starting policy, computed as the trained policy with its adapters disabled; valid if nothing but the adapter
    is trained."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = policy

    def forward(self, *arguments, **options):
        with adapters_disabled(self.policy):
            return self.policy(*arguments, **options)


@contextmanager
def adapters_disabled(model: nn.Module):
    layers = adapted_layers(model).values()
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def describe(lm: nn.Module, section: LoraSection) -> dict[str, Any]:
    """{key: value} of the section `[lora]`, which describe the adapter of `lm`, with the layers that it adapts as
    `targets`; {"rank": 0} if `lm` has no adapter."""
    if not section.is_set:
        return {"rank": 0}
    return section.model_dump() | {"targets": sorted({name.rpartition(".")[2] for name in adapted_layers(lm)})}


def save_adapter(
    folder: Path, weights: dict[str, Tensor], tied: dict[str, str], adapter: dict[str, Any], base: str
) -> None:
    """Write an adapter folder for `peft.PeftModel.from_pretrained`. `weights`: trained tensors by name in the model.
    `adapter`: from `describe`. `base`: folder or name of the model that the adapter belongs to.

    peft replaces the model's own tensors by those trained whole, and needs tied tensors in the file as well: `tied`
    maps their names to the tensors that they are tied to.
    """
    folder.mkdir(parents=True)
    weights = weights | {name: weights[first].clone() for name, first in tied.items()}
    whole = {name for name in weights if not name.endswith(PARTS)}
    description = stored.adapter_config(adapter["rank"], adapter["alpha"], adapter["targets"], base)
    if whole:
        description["modules_to_save"] = sorted(name.split(".")[-2] for name in whole - tied.keys())
        description["ensure_weight_tying"] = bool(tied)
    (folder / stored.ADAPTER_CONFIG_FILE).write_bytes(orjson.dumps(description, option=orjson.OPT_INDENT_2))
    named = {
        f"{stored.PEFT_PREFIX}{name if name in whole else f'{name}.weight'}": tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(named, folder / stored.ADAPTER_TENSORS_FILE, metadata={"format": "pt"})
