"""A Hugging Face folder's weights, read into a model that may be sharded already: each rank reads the rows it keeps.

lm = empty_model(folder, attention)     # shapes alone
fully_shard(lm, ...)
fill(lm, folder)
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

log = logging.getLogger(__name__)

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"


class ModelError(ValueError):
    """A model that the learner cannot train; the text says why."""


def empty_model(folder: Path, attention: str, body_alone: bool = False) -> nn.Module:
    """The causal LM of a folder's config.json, fp32, or its body without the head. Its parameters have shapes and no
    memory; its buffers have."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{folder}: its weights are quantised, which the learner does not train; give the original")
    with parameters_without_memory():
        kind = AutoModel if body_alone else AutoModelForCausalLM
        return kind.from_config(config, dtype=torch.float32, attn_implementation=attention)


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made meanwhile have parameters on the meta device, and ordinary buffers: what a model computes
    for itself is in no file."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def persistent_buffers(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that are saved with the weights."""
    kept = lm.state_dict().keys()
    return ((name, buffer) for name, buffer in lm.named_buffers() if name in kept)


class Files:
    """Which of a folder's files has which tensor."""

    def __init__(self, folder: Path):
        self.folder, index = folder, folder / INDEX
        names = [ONE_FILE]
        if index.is_file():
            names = sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(f"{folder}: there is no {missing[0]}; give a whole Hugging Face folder")
        self.path_of: dict[str, Path] = {}
        for path in (folder / name for name in names):
            with safe_open(path, "pt") as opened:
                self.path_of |= dict.fromkeys(opened.keys(), path)

    def slices(self, keys: Iterable[str]) -> dict[str, Any]:
        """Of each tensor a thing whose part can be read. A file is mapped as long as one of them is there."""
        keys = list(keys)
        opened = {path: safe_open(path, "pt") for path in {self.path_of[key] for key in keys}}
        return {key: opened[self.path_of[key]].get_slice(key) for key in keys}


@dataclass
class Source:
    """What becomes a tensor of the model, or several: one of the files' as it is, or as many as a converter takes."""

    converter: WeightConverter | None = None
    keys: dict[str, list[str]] = field(default_factory=dict)
    """of the files, by the converter's pattern, those of one in their order"""


def fill(lm: nn.Module, folder: Path) -> None:
    """Give memory to the parameters of `lm` that have none, and read them: of sharded ones this rank's rows, of others
    all; buffers that are saved, too. `ModelError` for what the folder lacks, or has in another shape. Tensors that the
    model does not know are left out, and logged."""
    files, tied = Files(folder), dict(lm.all_tied_weights_keys)
    targets = {name: value for name, value in lm.named_parameters() if value.is_meta} | dict(persistent_buffers(lm))
    sources = sources_of(lm, files)
    for name, original in tied.items():
        if name in sources and original not in sources:
            sources[original] = sources.pop(name)
    unknown = [name for name in sources if name not in targets and name not in tied]
    for name in [name for name in sources if name in targets]:
        for found, value in read(files, sources[name], name, targets[name], lm).items():
            put(lm, found, targets.pop(found), value)
    if targets:
        raise ModelError(f"{folder}: its weights lack {sorted(targets)[0]}; give a whole Hugging Face folder")
    for name, original in tied.items():
        if name in sources:
            check_tied(files, sources[name], name, lm.get_parameter(original), lm)
    lm.tie_weights()
    if unknown:
        log.warning("%s: %d of its tensors are left out, the first is %s", folder, len(unknown), sorted(unknown)[0])


def sources_of(lm: nn.Module, files: Files) -> dict[str, Source]:
    """By the name in the model, of those that a converter makes the first; as `from_pretrained` finds them."""
    transforms = get_model_conversion_mapping(lm)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, found = lm.state_dict(), dict[str, Source]()
    for key in sorted(files.path_of, key=natural):
        name, pattern = rename_source_key(key, renamings, converters, lm.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        source = found.setdefault(name, Source(deepcopy(by_pattern.get(pattern))))
        source.keys.setdefault(pattern or key, []).append(key)
    lm._weight_conversions = [each for each in transforms if each.was_used()]  # by which names are turned back
    return found


def natural(key: str) -> list[tuple[int, str]]:
    """Expert 2 goes before expert 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", key)]


def read(files: Files, source: Source, name: str, target: Tensor, lm: nn.Module) -> dict[str, Tensor]:
    """This rank's rows of what `source` becomes, by name; the first is `target`.

    A converter that stacks tensors gets this rank's alone; any other all of them whole.
    """
    slices, rows = files.slices(key for keys in source.keys.values() for key in keys), own_rows(target)
    if source.converter is None:
        ((key,),) = source.keys.values()
        check_shape(files, name, slices[key].get_shape(), target)
        return {name: part(slices[key], rows)}
    stacked = all(
        len(keys) == len(target) and len(slices[key].get_shape()) == target.ndim - 1
        for keys in source.keys.values()
        for key in keys
    )
    for pattern, keys in source.keys.items():
        for key in keys[rows] if stacked else keys:
            source.converter.add_tensor(name, key, pattern, slices[key][...])
    if stacked and rows.start == rows.stop:
        return {name: torch.empty(0, *target.shape[1:])}
    made = source.converter.convert(name, model=lm, config=lm.config)
    made = {found: value[0] if isinstance(value, list) else value for found, value in made.items()}
    if stacked:
        check_shape(files, name, [len(target), *made[name].shape[1:]], target)
        return made
    for found, value in made.items():
        check_shape(files, found, value.shape, lm.get_parameter(found))
    return {found: value[own_rows(lm.get_parameter(found))] for found, value in made.items()}


def check_shape(files: Files, name: str, shape: Sequence[int], target: Tensor) -> None:
    if tuple(shape) != tuple(target.shape):
        raise ModelError(
            f"{files.folder}: its {name} is {list(shape)}, and config.json makes it {list(target.shape)}; give the "
            "folder as it was saved"
        )


def own_rows(tensor: Tensor) -> slice:
    """Those of a sharded tensor that this rank keeps, the r-th `ceil(n / R)` of n with FSDP2; of another all."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor) if tensor.ndim else None)
    each = -(-len(tensor) // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * each, len(tensor))
    return slice(first, min(first + each, len(tensor)))


def part(tensor: Any, rows: slice) -> Tensor:
    """Rows of a tensor in a file; one without dimensions whole."""
    shape = tensor.get_shape()
    if not shape:
        return tensor[...]
    return tensor[rows] if rows.start != rows.stop else torch.empty(0, *shape[1:])


@torch.no_grad()
def put(lm: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
    """Make `value`, this rank's rows, what `lm` has under that name, in the type and the place of `target`."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if not local.is_meta:
        local.copy_(value)
        return
    device = target.device_mesh.device_type if isinstance(target, DTensor) else "cpu"
    read_in = torch.empty_like(local, device=device).copy_(value)
    if isinstance(target, DTensor):
        shape, stride = target.shape, target.stride()
        read_in = DTensor.from_local(
            read_in, target.device_mesh, target.placements, run_check=False, shape=shape, stride=stride
        )
    module, _, attribute = name.rpartition(".")
    setattr(lm.get_submodule(module), attribute, nn.Parameter(read_in, target.requires_grad))


def check_tied(files: Files, source: Source, name: str, original: Tensor, lm: nn.Module) -> None:
    """That a tensor that the files have twice is the same twice. Raises ModelError."""
    (value,) = read(files, source, name, original, lm).values()
    kept = original.to_local() if isinstance(original, DTensor) else original
    if not torch.equal(value.to(kept), kept):
        raise ModelError(
            f"{files.folder}: config.json ties {name} to other weights, and the files have values of its own for it; "
            "set tie_word_embeddings = false there, or leave it out of the files"
        )
