"""Megatron's own distributed checkpoints, `torch_dist`, of a Hugging Face folder's weights, and back.

In one process, on a CPU. Which parameter lies where in a checkpoint, and under which name, says Megatron's
`sharded_state_dict`; whatever Megatron has that asks for an accelerator or starts processes is left out.
"""

import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from april.config import LearnerSection
from april.learner import checkpoint
from april.learner.backends.megatron.experts import has_experts
from april.learner.backends.megatron.groups import make_ready
from april.learner.backends.megatron.layout import Layout
from april.learner.backends.megatron.model import check_model, make_model
from april.learner.backends.megatron.names import pieces
from april.learner.backends.megatron.piece import Piece
from april.learner.loading import Files, ModelError
from april.learner.model import outline

FORMAT, VERSION = "torch_dist", 1
WHAT_IS_IN_IT = ".metadata"
FORMS: list[dict[str, bool]] = [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}]
"""in which Megatron has layers: all in one tensor; each for itself; and gate and up projection each for itself, too"""
OPTIMIZER = "optimizer."
"""stands in the names of what an optimizer keeps, of moments and of weights of its own"""
NORM = "pre_mlp_layernorm.weight"
NORMS = "mlp.linear_fc1.layer_norm_weight", NORM
"""names of the norm before experts: of Megatron's local layers, and of those of Transformer Engine"""


def write(folder: Path, out_dir: Path) -> None:
    """Fill `out_dir`, an empty folder, with the weights of a Hugging Face folder, in their type. Raises ModelError."""
    with model_of(folder) as (lm, model, found):
        for piece in found:
            piece.read(Files(folder))
        model.to(checkpoint.type_of_files(folder))
        state = model.sharded_state_dict()
        for name, tensor in list(norms_before_experts(lm, state)):
            state[f"{name}.too"] = replace(tensor, key=other_name(tensor.key))
        whole = {"model": state, "checkpoint_version": 3.0}  # queries, keys and values lie group by group
        dist_checkpointing.save(whole, str(out_dir), InThisProcess(FORMAT, VERSION))


def read(source: Path, folder: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """The outline of a Hugging Face folder's model, and its weights as a checkpoint of Megatron's has them, by name, in
    the type of the folder's. Nothing that Python could run is read of the checkpoint. Raises ModelError."""
    shapes = shapes_in(source)
    with model_of(folder) as (lm, model, found):
        state = state_as_in(source, lm, model, shapes)
        try:
            loaded = dist_checkpointing.load(state, str(source), common_strategy=WithoutCommon())
        except (CheckpointException, CheckpointingException, OSError, KeyError) as error:
            raise ModelError(f"{source} cannot be read whole ({first_line(error)}); give it as it was saved") from error
        model.load_state_dict(loaded, strict=False)
        dtype = checkpoint.type_of_files(folder)
        return lm, {piece.name: piece.of(piece.parameters).full_tensor().to(dtype) for piece in found}


@contextmanager
def model_of(folder: Path) -> Iterator[tuple[nn.Module, GPTModel, list[Piece]]]:
    """Of a Hugging Face folder: the outline of its model, that as Megatron's without values, and what is where in it.
    This process is a group of its own meanwhile."""
    device = torch.device("cpu")
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        section = LearnerSection()
        make_ready(section, device)
        lm, layout = outline(folder, 1.0).lm, Layout.of(section, device)
        check_model(lm, folder, layout)
        model = make_model(lm, layout)
        model.post_process = True  # its head is named as Megatron has it
        yield lm, model, list(pieces(model, lm, layout))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class InThisProcess(torch_dist.TorchDistSaveShardedStrategy):
    """Megatron's own writer waits for CUDA, and for processes that it forks, which want psutil. torch's writes the
    same."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        state = torch_dist.mcore_to_pyt_state_dict(flat, False)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint_dir), planner=planner)


class WithoutCommon(TorchCommonLoadStrategy):
    """`common.pt` may have any object, such as a trainer's arguments, and no weights."""

    def load_common(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}


def state_as_in(source: Path, lm: nn.Module, model: GPTModel, shapes: dict[str, torch.Size]) -> dict[str, Any]:
    """What `model` is to be given from a checkpoint with such tensors, by their names there. Raises ModelError."""
    lacking: list[str] = []
    for form in FORMS:
        state = {
            name: value
            for name, value in model.sharded_state_dict(metadata=form).items()
            if not isinstance(value, ShardedObject)
        }
        for _, tensor in norms_before_experts(lm, state):
            if tensor.key not in shapes:
                tensor.key = other_name(tensor.key)
        wanted = tensors_of(state)
        found_lacking = [tensor.key for tensor in wanted if tensor.key not in shapes]
        if not found_lacking:
            norms = {other_name(tensor.key) for _, tensor in norms_before_experts(lm, state)}
            check_tensors(source, wanted, shapes, norms)
            return state
        lacking = lacking or found_lacking
    raise ModelError(f"{source}: it lacks {lacking[0]}; give the model with --model that it is a checkpoint of")


def check_tensors(
    source: Path, wanted: list[ShardedTensor], shapes: dict[str, torch.Size], twice: Collection[str]
) -> None:
    """Raises ModelError where one is of another shape, but for more rows of a vocabulary; and where a checkpoint has
    more than these, but for an optimizer's and for what is there `twice`."""
    known = {tensor.key for tensor in wanted}.union(twice)
    if others := [key for key in shapes if key not in known and OPTIMIZER not in key]:
        raise ModelError(
            f"{source}: its {others[0]} has no place in the model; give the model with --model that it is a checkpoint "
            "of"
        )
    for tensor in wanted:
        found, expected = tuple(shapes[tensor.key]), tuple(tensor.global_shape)
        padded = tensor.allow_shape_mismatch and found[1:] == expected[1:] and found[0] >= expected[0]
        if found != expected and not padded:
            raise ModelError(
                f"{source}: its {tensor.key} is {list(found)}, and the model makes it {list(expected)}; give the model "
                "with --model that it is a checkpoint of"
            )


def tensors_of(state: dict[str, Any]) -> list[ShardedTensor]:
    """With those that others are made of."""
    made = dict(state)
    apply_factories(made)
    return [value for value in nested_values(made) if isinstance(value, ShardedTensor)]


def norms_before_experts(lm: nn.Module, state: dict[str, Any]) -> Iterator[tuple[str, ShardedTensor]]:
    for number, layer in enumerate(lm.base_model.layers):
        if has_experts(layer):
            name = f"decoder.layers.{number}.{NORM}"
            yield name, state[name]


def other_name(key: str) -> str:
    (before,) = (name for name in NORMS if key.endswith(f".{name}"))
    return key.removesuffix(before) + NORMS[1 - NORMS.index(before)]


def shapes_in(source: Path) -> dict[str, torch.Size]:
    """Of the tensors of a checkpoint, by their names there. Raises ModelError."""
    try:
        saved = orjson.loads((source / CONFIG_FNAME).read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{source / CONFIG_FNAME} is not one of a checkpoint of Megatron's; give its folder"
        ) from error
    if saved != FORMAT:
        raise ModelError(f"{source}: its format is {saved!r}; save it as {FORMAT!r} with Megatron, which reads both")
    try:
        with (source / WHAT_IS_IN_IT).open("rb") as file:
            known = Description(file).load().state_dict_metadata
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        raise ModelError(f"{source / WHAT_IS_IN_IT} cannot be read ({reason}); give it as it was saved") from error
    return {name: value.size for name, value in known.items() if hasattr(value, "size")}


class Description(pickle.Unpickler):
    """Reads what a checkpoint says of its tensors, and makes nothing else: Megatron reads the same file after it."""

    modules = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
    )
    """that have the forms of it, which are plain data"""
    others = (
        (torch.__name__, "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
        (torch_dist.__name__, "MCoreMetadata"),
        (torch_dist.__name__, "MCoreSavePlan"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.others:
            return super().find_class(module, name)
        if module in (*self.modules, torch.__name__) and "." not in name:
            found = super().find_class(module, name)
            is_form = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            if isinstance(found, torch.dtype) or (is_form and module in self.modules):
                return found
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint has")


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
