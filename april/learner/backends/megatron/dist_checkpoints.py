"""Conversion between a Hugging Face folder's weights and Megatron's distributed checkpoints (`torch_dist`).

Runs in one process on a CPU. Megatron's `sharded_state_dict` defines names and layout; the parts of Megatron that need
an accelerator or start processes are replaced.
"""

import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from april.learner.backends.megatron.groups import initialise_megatron
from april.learner.backends.megatron.layout import ParallelLayout
from april.learner.backends.megatron.model import check_model, make_model
from april.learner.backends.megatron.names import has_experts, mapped_tensors
from april.learner.backends.megatron.piece import MappedTensor
from april.learner.loading import ModelError, WeightFiles
from april.learner.model import empty_policy

FORMAT, VERSION = "torch_dist", 1
FORMS: list[dict[str, bool]] = [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}]
"""Metadata arguments of `sharded_state_dict` for each layout in which Megatron stores layers: all layers stacked in one
tensor; one tensor per layer; one tensor per layer with gate and up projections separate."""
OPTIMIZER = "optimizer."
"""Substring that identifies names of optimizer state: moments and the optimizer's master weights."""
NORM = "pre_mlp_layernorm.weight"
NORMS = "mlp.linear_fc1.layer_norm_weight", NORM
"""Names of the norm before the experts: with Transformer Engine's layers, and with Megatron's local layers."""


def write(folder: Path, out_dir: Path) -> None:
    """Write the weights of a Hugging Face folder, in its dtype, as a Megatron checkpoint into the empty folder
    `out_dir`. Raises ModelError."""
    with megatron_model(folder) as (lm, model, found):
        for mapped in found:
            mapped.read(WeightFiles(folder))
        model.to(checkpoint.dtype_of_folder(folder))
        state = model.sharded_state_dict()
        for name, tensor in list(expert_norms(lm, state)):
            state[f"{name}.too"] = replace(tensor, key=other_name(tensor.key))
        whole = {"model": state, "checkpoint_version": 3.0}  # queries, keys and values lie group by group
        dist_checkpointing.save(whole, str(out_dir), SingleProcessWriter(FORMAT, VERSION))


def read(source: Path, folder: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """Read the Megatron checkpoint `source`; returns the model of the Hugging Face folder on the meta device, and its
    weights by name, in the folder's dtype. No pickled code of the checkpoint is executed. Raises ModelError."""
    shapes = tensor_shapes(source)
    with megatron_model(folder) as (lm, model, found):
        state = state_to_load(source, lm, model, shapes)
        try:
            loaded = dist_checkpointing.load(state, str(source), common_strategy=NoCommonState())
        except (CheckpointException, CheckpointingException, OSError, KeyError) as error:
            raise ModelError(f"{source} cannot be read whole ({first_line(error)}); give it as it was saved") from error
        model.load_state_dict(loaded, strict=False)
        dtype = checkpoint.dtype_of_folder(folder)
        return lm, {mapped.name: mapped.to_hugging_face(mapped.parameters).full_tensor().to(dtype) for mapped in found}


@contextmanager
def megatron_model(folder: Path) -> Iterator[tuple[nn.Module, GPTModel, list[MappedTensor]]]:
    """Context manager that makes this process a process group of one rank, and yields for a Hugging Face folder: (the
    model on the meta device, the same model as Megatron's, how the tensors of both map to each other)."""
    device = torch.device("cpu")
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        section = LearnerSection()
        initialise_megatron(section, device)
        lm, layout = empty_policy(folder, 1.0).lm, ParallelLayout.from_section(section, device)
        check_model(lm, folder, layout)
        model = make_model(lm, layout)
        model.post_process = True  # the head gets the name that Megatron gives it
        yield lm, model, list(mapped_tensors(model, lm, layout))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class SingleProcessWriter(torch_dist.TorchDistSaveShardedStrategy):
    """Save strategy that uses torch's writer, whose files are the same. Megatron's own writer needs CUDA, and forks
    processes, which need psutil."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        state = torch_dist.mcore_to_pyt_state_dict(flat, False)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint_dir), planner=planner)


class NoCommonState(TorchCommonLoadStrategy):
    """Load strategy that skips `common.pt`, which may hold any pickled object and has no weights."""

    def load_common(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}


def state_to_load(source: Path, lm: nn.Module, model: GPTModel, shapes: dict[str, torch.Size]) -> dict[str, Any]:
    """State dict of `model` to load from the checkpoint `source`, in the first of the layouts `FORMS` whose tensors are
    all in the checkpoint. `lm`: the same model as Hugging Face's. `shapes`: shapes of the checkpoint's tensors, by
    name. Raises ModelError if no layout fits."""
    lacking: list[str] = []
    for form in FORMS:
        state = {
            name: value
            for name, value in model.sharded_state_dict(metadata=form).items()
            if not isinstance(value, ShardedObject)
        }
        for _, tensor in expert_norms(lm, state):
            if tensor.key not in shapes:
                tensor.key = other_name(tensor.key)
        wanted = tensors_of(state)
        found_lacking = [tensor.key for tensor in wanted if tensor.key not in shapes]
        if not found_lacking:
            norms = {other_name(tensor.key) for _, tensor in expert_norms(lm, state)}
            check_tensors(source, wanted, shapes, norms)
            return state
        lacking = lacking or found_lacking
    raise ModelError(f"{source}: it lacks {lacking[0]}; give the model with --model that it is a checkpoint of")


def check_tensors(
    source: Path, wanted: list[ShardedTensor], shapes: dict[str, torch.Size], twice: Collection[str]
) -> None:
    """Compare a checkpoint's tensors, whose `shapes` are given by name, with the model's tensors `wanted`. Raises
    ModelError if a tensor has another shape than the model's (more rows of a vocabulary are allowed), or if the model
    has no such tensor. Optimizer state need not be in the model, nor the names in `twice`, under which a
    checkpoint may have tensors of the model a second time."""
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
    """All sharded tensors of a state dict, including those created by its `ShardedTensorFactory` entries."""
    made = dict(state)
    apply_factories(made)
    return [value for value in nested_values(made) if isinstance(value, ShardedTensor)]


def expert_norms(lm: nn.Module, state: dict[str, Any]) -> Iterator[tuple[str, ShardedTensor]]:
    for number, layer in enumerate(lm.base_model.layers):
        if has_experts(layer):
            name = f"decoder.layers.{number}.{NORM}"
            yield name, state[name]


def other_name(key: str) -> str:
    (before,) = (name for name in NORMS if key.endswith(f".{name}"))
    return key.removesuffix(before) + NORMS[1 - NORMS.index(before)]


def tensor_shapes(source: Path) -> dict[str, torch.Size]:
    """Shapes of the tensors of a checkpoint, by name. Raises ModelError."""
    try:
        saved = orjson.loads((source / CONFIG_FNAME).read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{source / CONFIG_FNAME} is not one of a checkpoint of Megatron's; give its folder"
        ) from error
    if saved != FORMAT:
        raise ModelError(f"{source}: its format is {saved!r}; save it as {FORMAT!r} with Megatron, which reads both")
    try:
        with (source / checkpoint.METADATA_FILE).open("rb") as file:
            known = MegatronUnpickler(file).load().state_dict_metadata
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        raise ModelError(
            f"{source / checkpoint.METADATA_FILE} cannot be read ({reason}); give it as it was saved"
        ) from error
    return {name: value.size for name, value in known.items() if hasattr(value, "size")}


class MegatronUnpickler(checkpoint.MetadataUnpickler):
    """Unpickles a checkpoint's `.metadata`, and refuses every class but those that describe tensors and two of
    Megatron's. The file is read so first, since Megatron later unpickles it without such a limit."""

    others = (
        *checkpoint.MetadataUnpickler.others,
        (torch_dist.__name__, "MCoreMetadata"),
        (torch_dist.__name__, "MCoreSavePlan"),
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
