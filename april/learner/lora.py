"""Low-rank adapters: linear layers train B A beside a weight that stands still (LoRA, arXiv 2106.09685, section 4.1).

To whoever reads or publishes weights, an adapted model has the tensors that it had before, with the adapter in them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion

from april.config.lora import LoraSection, adapted
from april.formats import peft
from april.weights.base import DOWN, UP, merge

PARTS = (DOWN, UP)


class AdaptedLinear(nn.Linear):
    """W x + b + scaling B A x, of which A [rank, in] and B [out, rank] are trained. W and b keep their names."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float, generator: torch.Generator):
        """B is zero, so that nothing changes at first; A as peft and the paper's code draw it."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)
        self.scaling, self.switched_on = scaling, True

    def forward(self, x: Tensor) -> Tensor:
        """The adapter is added to W x where that lies, and scaled where it is narrow: on a CPU a third of its cost."""
        if not self.switched_on:
            return super().forward(x)
        rows = x.flatten(0, -2)
        narrow = self.scaling * F.linear(rows, self.lora_A)
        return super().forward(rows).addmm_(narrow, self.lora_B.T).view(*x.shape[:-1], self.out_features)

    def merged(self) -> Tensor:
        """W + scaling B A. Collective if they are sharded: each rank computes its own rows, from all of A."""
        down, up = self.lora_A.detach(), self.lora_B.detach()
        if isinstance(down, DTensor):
            down = down.redistribute(placements=[Replicate()])
        return merge(self.weight.detach(), down, up, self.scaling)


def attach(lm: nn.Module, section: LoraSection, seed: int) -> None:
    """Give the chosen linear layers of `lm` an adapter, in place; nothing else is trained any more, but embedding and
    head where they are to be. The same seed gives the same adapter. Raises ConfigError for targets that `lm` does not
    have."""
    lm.requires_grad_(False)
    layers = set(lm.base_model.layers.modules())
    linears = {
        name: module for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module in layers
    }
    generator = torch.Generator().manual_seed(seed)
    for name in adapted(linears, section):
        adapter = AdaptedLinear(linears[name], section.rank, section.alpha / section.rank, generator)
        lm.set_submodule(name, adapter)
    for table in (lm.get_input_embeddings(), lm.get_output_embeddings()) if section.embedding else ():
        table.weight.requires_grad_(True)


def adapted_layers(lm: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: module for name, module in lm.named_modules() if isinstance(module, AdaptedLinear)}


def merged_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's own parameters with the adapter in them, as they are asked for. Collective if they are sharded."""
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(lm).items()}
    for name, parameter in lm.named_parameters():
        if name in layers:
            yield name, layers[name].merged()
        elif not name.endswith(PARTS):
            yield name, parameter


def names_in_files(lm: nn.Module, trained: Iterable[str]) -> dict[str, str] | None:
    """What the files of `lm` call the weights of its adapted layers, and what is trained whole; None where some of
    these lie in files in another form. `trained`: all names that are.

    Names are turned back as those of weights are, here of numbers that take no memory.
    """
    weights = [f"{name}.weight" for name in adapted_layers(lm)] + [name for name in trained if not name.endswith(PARTS)]
    shapes = [lm.get_parameter(name).shape for name in weights]
    numbered = {name: torch.tensor(i).expand(shapes[i]) for i, name in enumerate(weights)}
    found = {
        name: (int(value[(0,) * value.dim()]), value) for name, value in revert_weight_conversion(lm, numbered).items()
    }
    if sorted(i for i, _ in found.values()) != list(range(len(weights))):
        return None
    same = all(value.shape == shapes[i] for i, value in found.values())
    return {weights[i]: name for name, (i, _) in found.items()} if same else None


def as_published(trained: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """What is trained of a model, by the names of its files, which `names` are."""
    found = {}
    for name, tensor in trained.items():
        layer, _, part = name.rpartition(".")
        if part in PARTS:
            found[f"{names[f'{layer}.weight'].removesuffix('.weight')}.{part}"] = tensor
        else:
            found[names[name]] = tensor
    return found


class WithoutAdapter(nn.Module):
    """A policy as it was before its adapter, and nothing else, was trained, from the same weights; called as it is."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = policy

    def forward(self, *arguments, **options):
        with switched_off(self.policy):
            return self.policy(*arguments, **options)


@contextmanager
def switched_off(model: nn.Module):
    layers = adapted_layers(model).values()
    try:
        for layer in layers:
            layer.switched_on = False
        yield
    finally:
        for layer in layers:
            layer.switched_on = True


def describe(lm: nn.Module, section: LoraSection) -> dict[str, Any]:
    """The adapter of `lm` as the keys of `[lora]` say it; those of none where there is none."""
    if not section.is_set:
        return {"rank": 0}
    return section.model_dump() | {"targets": sorted({name.rpartition(".")[2] for name in adapted_layers(lm)})}


def save_adapter(
    folder: Path, weights: dict[str, Tensor], tied: dict[str, str], adapter: dict[str, Any], base: Path
) -> None:
    """Write what `peft.PeftModel.from_pretrained` reads of all that is trained; `base`: the model folder it belongs to.

    What is trained whole peft puts in the place of the model's own. It wants what is `tied` to that, given by name with
    what it is tied to, in the file again.
    """
    folder.mkdir(parents=True)
    weights = weights | {name: weights[first].clone() for name, first in tied.items()}
    whole = {name for name in weights if not name.endswith(PARTS)}
    description = peft.description(adapter["rank"], adapter["alpha"], adapter["targets"], base)
    if whole:
        description["modules_to_save"] = sorted(name.split(".")[-2] for name in whole - tied.keys())
        description["ensure_weight_tying"] = bool(tied)
    (folder / peft.CONFIG).write_bytes(orjson.dumps(description, option=orjson.OPT_INDENT_2))
    named = {
        f"{peft.PREFIX}{name if name in whole else f'{name}.weight'}": tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(named, folder / peft.TENSORS, metadata={"format": "pt"})
