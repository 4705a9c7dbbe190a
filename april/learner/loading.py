"""Loading of a Hugging Face folder's weights into a model that may be sharded: each rank reads only its own rows.

lm = empty_model(folder, attention)     # parameters on the meta device
fully_shard(lm, ...)
load_weights(lm, folder)
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from april.learner.attention_kernels import Packing
from april.learner.frozen_base import pack, shape_in_files
from april.learner.mixers import split_mixers
from april.learner.vision import prepare_tower, text_model
from april.util.files import WEIGHTS, length_dependent_positions, weight_files

log = logging.getLogger(__name__)


class ModelError(ValueError):
    """A model that the learner cannot train; the message says why."""


RANDOM = re.compile(r"drop|jitter|noise")
"""Regular expression for names of configuration keys that make a model compute something at random in training."""


def empty_model(folder: Path, attention: str, body_alone: bool = False, recompute: bool = False) -> nn.Module:
    """The causal LM of a folder's config.json in fp32, or its body without the head (`body_alone`). Parameters are on
    the meta device, buffers on the CPU.

    `attention`: name of the attention function in transformers. Dropout and other noise are off. Mixers, layers that
    carry a state from token to token, are called once for each sequence. With `recompute`, the backward pass computes
    activations again. Raises ModelError for quantised weights, for rotary positions that depend on the length of all
    that is computed together, and for a model that cannot recompute.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{folder}: its weights are quantised, which the learner does not train; give the original")
    if kind_of_positions := length_dependent_positions(config.to_dict()):
        raise ModelError(
            f"{folder}: its rotary positions of type {kind_of_positions!r} depend on the length of what is computed "
            "together, and the learner packs sequences; give a model with another type"
        )
    turn_off_noise(config)
    with parameters_without_memory():
        kind = AutoModel if body_alone else auto_class(config)
        lm: nn.Module = kind.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    if lm.base_model is lm and not body_alone and hasattr(lm, "model"):
        lm.base_model_prefix = "model"  # Llama 4's names the body of the model with images
    split_mixers(text_model(lm))
    prepare_tower(lm)
    if recompute:
        recompute_layers(lm)
    return lm


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that builds the model of a configuration: that of vision-language models where it knows no
    causal LM."""
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if takes_images and not is_causal else AutoModelForCausalLM


def loads_tower(folder: Path) -> bool:
    """Whether the learner loads the model of a folder as a vision-language model, with its vision tower."""
    return auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=False)) is AutoModelForImageTextToText


def recompute_layers(lm: nn.Module) -> None:
    """Have the backward pass recompute the activations of each layer instead of keeping them, in place. Raises
    ModelError for a model that cannot."""
    if not lm.supports_gradient_checkpointing:
        raise ModelError(
            f"the activations of {type(lm).__name__} cannot be recomputed; set learner.activation_checkpointing = false"
        )
    row = getattr(text_model(lm), "packed_row", None)
    lm.gradient_checkpointing_enable({"use_reentrant": False} | ({"context_fn": row.contexts} if row else {}))


def hold_inputs_on_host(lm: nn.Module, pinned: bool) -> None:
    """Change a model whose layers are recomputed, in place: the forward pass moves the input of each layer to the
    host's memory, page-locked if `pinned`, and the backward pass copies it back."""
    forward = lm.base_model.forward

    @wraps(forward)
    def forward_with_inputs_on_host(*inputs: Any, **named: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return forward(*inputs, **named)

    lm.base_model.forward = forward_with_inputs_on_host


def turn_off_noise(config: PreTrainedConfig) -> None:
    """Set every probability of dropout, jitter or noise in a model's configuration to 0.

    The policy that is trained has to be the one that was sampled from.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            turn_off_noise(value)
        elif RANDOM.search(name) and isinstance(value, float) and value:
            log.info("the model's %s = %g is 0 in training", name, value)
            setattr(config, name, 0.0)


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Context manager under which new modules get parameters on the meta device, but ordinary buffers: computed buffers
    are in no file."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            parameter._is_hf_initialized = True  # else transformers draws values, which nothing holds
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@dataclass(frozen=True)
class LogitMap:
    """A model's function from the product z of its head and a hidden state to a logit: scale z, or with a soft cap cap
    tanh(scale z / cap)."""

    scale: float = 1.0
    cap: float | None = None


class BodyOutput(tuple):
    """Stands in for the output of a model's body; only the first field, the hidden states, has a value."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


PRODUCTS = (0.0, 2.0**-10, -1.0, 1.0, 3.0, -20.0, 50.0, 300.0, 2.0**24)
"""Values of the product of head and hidden state for which `logit_map` asks a model for its logits."""


def logit_map(lm: nn.Module, folder: Path) -> LogitMap:
    """The function from the head's product to logits of a causal LM, found by its own forward pass with known values in
    place of its body and its head. Raises ModelError if it is neither a scale nor a soft cap."""
    body, head = lm.base_model, lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(f"{folder}: its head is no linear layer, and the learner computes no other")
    products, (size, width) = torch.tensor(PRODUCTS), head.weight.shape
    hidden, starts = products[None, :, None].expand(1, -1, width), torch.tensor([0, len(products)], dtype=torch.int32)
    body.forward = lambda *arguments, **options: BodyOutput((hidden,))
    head.forward = lambda states: states[..., :1].expand(*states.shape[:-1], size)
    try:
        with torch.no_grad():
            ids = torch.zeros(1, len(products), dtype=torch.int64)
            logits = lm(input_ids=ids, use_cache=False, packing=Packing([len(products)], starts)).logits[0].double()
    except Exception as error:
        raise ModelError(f"{folder}: what the model makes of its head's products cannot be found: {error}") from error
    finally:
        del body.forward, head.forward
    found = logits[:, 0]
    cap = float(found[-1].abs()) if found[-1].abs() < found[3].abs() * products[-1] / 2 else None
    scale = float(found[3]) if cap is None else float(found[1] / products[1])
    scaled = scale * products.double()
    expected = scaled if cap is None else cap * torch.tanh(scaled / cap)
    same = logits.shape == (len(products), size) and torch.equal(logits, found[:, None].expand_as(logits))
    if not same or scale <= 0 or not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
        raise ModelError(f"{folder}: the model changes its logits in a way the learner does not compute")
    return LogitMap(1.0 if abs(scale - 1) < 1e-6 else scale, cap)


def persistent_buffers(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of each buffer of a model that is saved with the weights."""
    kept = lm.state_dict().keys()
    return ((name, buffer) for name, buffer in lm.named_buffers() if name in kept)


class WeightFiles:
    """Index of the tensors in the files of a folder's weights. Raises ModelError if a file is missing."""

    def __init__(self, folder: Path):
        self.folder, paths = folder, weight_files(folder) or [folder / WEIGHTS]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ModelError(f"{folder}: there is no {missing[0]}; give a whole Hugging Face folder")
        self.path_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, "pt") as opened:
                self.path_of |= dict.fromkeys(opened.keys(), path)

    def slices(self, keys: Iterable[str]) -> dict[str, Any]:
        """Lazy slices of tensors, from which parts can be read. A file stays mapped while one of its slices exists."""
        keys = list(keys)
        opened = {path: safe_open(path, "pt") for path in {self.path_of[key] for key in keys}}
        return {key: opened[self.path_of[key]].get_slice(key) for key in keys}


@dataclass
class TensorSource:
    """The tensors in files from which one tensor of the model is made or, by a converter, several tensors of the
    model."""

    converter: WeightConverter | None = None
    """transformers' conversion from `keys` to the model's tensors; None for a single tensor that is read as it is."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Tensor names in the files, in order, grouped by the source pattern of the converter that they match."""


def load_weights(lm: nn.Module, folder: Path) -> None:
    """Allocate and read the parameters of `lm` that are on the meta device, and its persistent buffers; of sharded
    tensors only this rank's rows. Raises ModelError for tensors that are missing or have another shape. Tensors unknown
    to the model are skipped and logged."""
    files, tied = WeightFiles(folder), dict(lm.all_tied_weights_keys)
    targets = {name: value for name, value in lm.named_parameters() if value.is_meta} | dict(persistent_buffers(lm))
    sources = tensor_sources(lm, files)
    for name, original in tied.items():
        if name in sources and original not in sources:
            sources[original] = sources.pop(name)
    unknown = [name for name in sources if name not in targets and name not in tied]
    for name in [name for name in sources if name in targets]:
        for found, value in read_tensors(files, sources[name], name, targets[name], lm).items():
            assign(lm, found, targets.pop(found), value)
    if targets:
        raise ModelError(f"{folder}: its weights lack {sorted(targets)[0]}; give a whole Hugging Face folder")
    for name, original in tied.items():
        if name in sources:
            check_tied(files, sources[name], name, lm.get_parameter(original), lm)
    lm.tie_weights()
    if unknown:
        log.warning("%s: %d of its tensors are left out, the first is %s", folder, len(unknown), sorted(unknown)[0])


def check_files(lm: nn.Module, folder: Path) -> None:
    """Check that a folder's files have the parameters of `lm`, in their shapes, reading no values. Parameters that
    transformers makes of other tensors when it loads a model are not checked. Raises ModelError."""
    files, tied = WeightFiles(folder), dict(lm.all_tied_weights_keys)
    sources, parameters = tensor_sources(lm, files), dict(lm.named_parameters())
    plain = {name: key for name, each in sources.items() if not each.converter for (key,) in each.keys.values()}
    for name in sorted(plain.keys() & parameters.keys()):
        shape = files.slices([plain[name]])[plain[name]].get_shape()
        check_shape(files, name, shape, shape_in_files(lm, name, parameters[name]))
    there = {tied.get(name, name) for name in sources}
    missing = sorted(name for name in parameters if tied.get(name, name) not in there)
    if missing and len(plain) == len(sources):
        raise ModelError(f"{folder}: its weights lack {missing[0]}; give a whole Hugging Face folder")


def tensor_sources(lm: nn.Module, files: WeightFiles) -> dict[str, TensorSource]:
    """For each tensor of `lm` that the files have, by its name in `lm`: the tensors in the files that it is made from,
    as transformers' `from_pretrained` finds them. If one converter makes several tensors of `lm`, they are listed under
    the name of the first."""
    transforms = get_model_conversion_mapping(lm)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, found = lm.state_dict(), dict[str, TensorSource]()
    for key in sorted(files.path_of, key=natural_sort_key):
        name, pattern = rename_source_key(key, renamings, converters, lm.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        source = found.setdefault(name, TensorSource(deepcopy(by_pattern.get(pattern))))
        source.keys.setdefault(pattern or key, []).append(key)
    lm._weight_conversions = [each for each in transforms if each.was_used()]  # used to convert names back
    return found


def natural_sort_key(key: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers in a name as numbers: expert 2 before expert 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", key)]


def read_tensors(
    files: WeightFiles, source: TensorSource, name: str, target: Tensor, lm: nn.Module
) -> dict[str, Tensor]:
    """Read this rank's rows of the model's tensors that are made from `source`; returns them by name. `name` is the
    first tensor, shaped like `target`.

    With a converter that stacks tensors (experts) only this rank's are read; with any other converter all of them.
    """
    slices, rows = files.slices(key for keys in source.keys.values() for key in keys), local_rows(target)
    if source.converter is None:
        ((key,),) = source.keys.values()
        check_shape(files, name, slices[key].get_shape(), shape_in_files(lm, name, target))
        return {name: read_rows(slices[key], rows)}
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
    converted = source.converter.convert(name, model=lm, config=lm.config)
    converted = {found: value[0] if isinstance(value, list) else value for found, value in converted.items()}
    if stacked:
        check_shape(files, name, [len(target), *converted[name].shape[1:]], target.shape)
        return converted
    for found, value in converted.items():
        check_shape(files, found, value.shape, shape_in_files(lm, found, lm.get_parameter(found)))
    return {found: value[local_rows(lm.get_parameter(found))] for found, value in converted.items()}


@dataclass(frozen=True)
class FileTensor:
    """Counterpart in the model of a tensor of Hugging Face files: consecutive values of one of the model's tensors."""

    source: str
    """Name of the model's tensor that has the values."""
    first: int
    """Index of this tensor's first value in the flattened tensor `source` of the model."""
    shape: torch.Size


class WithoutCopies(TorchFunctionMode):
    """Context manager in which `Tensor.contiguous` returns the tensor itself, so that a view stays a view."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        return arguments[0] if function is Tensor.contiguous else function(*arguments, **(named or {}))


def tensors_in_files(lm: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, FileTensor] | None:
    """The tensors in Hugging Face files that correspond to tensors of `lm`, by their names in the files. `shapes`:
    shapes of these tensors of `lm`, by their names in `lm`. None if a tensor of the files is not a run of consecutive
    values of a tensor of `lm`.

    transformers' own conversion of a state dict is applied to tensors without memory. Its results are views, which tell
    where they lie in a tensor of `lm`: an expert of a mixture is one row of a tensor that holds all experts of a layer.
    """
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    try:
        with WithoutCopies():
            converted = revert_weight_conversion(lm, empty)
    except RuntimeError:  # it computes with values
        return None
    found = {}
    for name, view in converted.items():
        source = names.get(view.untyped_storage()._cdata)
        if source is None or not view.is_contiguous():
            return None
        found[name] = FileTensor(source, int(view.storage_offset()), view.shape)
    return found


def names_in_files(lm: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, str] | None:
    """The name in Hugging Face files of each of some tensors of `lm`, by its name in `lm`; None if one of them has
    another form in files. `shapes`: shapes of these tensors, by their names in `lm`."""
    found = tensors_in_files(lm, shapes) or {}
    names = {each.source: name for name, each in found.items() if each.shape == shapes[each.source]}
    return names if len(names) == len(found) == len(shapes) else None


def check_shape(files: WeightFiles, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise ModelError(
            f"{files.folder}: its {name} is {list(shape)}, and config.json makes it {list(expected)}; give the "
            "folder as it was saved"
        )


def local_rows(tensor: Tensor) -> slice:
    """Rows of a sharded tensor that this rank holds. As FSDP2 divides n rows over R ranks, rank r has the r-th block of
    `ceil(n / R)` rows. All rows of an unsharded tensor."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor) if tensor.ndim else None)
    each = -(-len(tensor) // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * each, len(tensor))
    return slice(first, min(first + each, len(tensor)))


def read_rows(tensor: Any, rows: slice) -> Tensor:
    """The `rows` of a tensor in a file (a lazy slice of safetensors); a scalar is read whole."""
    shape = tensor.get_shape()
    if not shape:
        return tensor[...]
    return tensor[rows] if rows.start != rows.stop else torch.empty(0, *shape[1:])


@torch.no_grad()
def assign(lm: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
    """Store `value`, this rank's rows, as the tensor `name` of `lm`, in the dtype and on the device of `target`; packed
    in NF4 if `target` is uint8."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if not local.is_meta:
        local.copy_(value)
        return
    device = target.device_mesh.device_type if isinstance(target, DTensor) else "cpu"
    value = pack(value.to(device)) if local.dtype == torch.uint8 and value.is_floating_point() else value.to(device)
    read_in = torch.empty_like(local, device=device).copy_(value)  # converted there, not on the way
    if isinstance(target, DTensor):
        shape, stride = target.shape, target.stride()
        read_in = DTensor.from_local(
            read_in, target.device_mesh, target.placements, run_check=False, shape=shape, stride=stride
        )
    module, _, attribute = name.rpartition(".")
    setattr(lm.get_submodule(module), attribute, nn.Parameter(read_in, target.requires_grad))


def check_tied(files: WeightFiles, source: TensorSource, name: str, original: Tensor, lm: nn.Module) -> None:
    """Check that a tied tensor which the files have too equals `original`, the tensor of `lm` that it is tied to.
    `name`: name of the tied tensor in `lm`; `source`: its place in the files. Raises ModelError."""
    (value,) = read_tensors(files, source, name, original, lm).values()
    kept = original.to_local() if isinstance(original, DTensor) else original
    if not torch.equal(value.to(kept), kept):
        raise ModelError(
            f"{files.folder}: config.json ties {name} to other weights, and the files have values of its own for it; "
            "set tie_word_embeddings = false there, or leave it out of the files"
        )
