"""Resumable checkpoints of the sharded learner.

A checkpoint is written under a temporary name and renamed once it is complete and on disk, so a folder `step_000010`
was complete when it got its name. It contains the checksums of its files (`sha256sum -c SHA256SUMS` checks them), and a
learner verifies them before it resumes. Where ranks have disks of their own, each disk has a part of the files and the
checksums of all; `store.py` writes, finds and restores checkpoints on one disk or several.
"""

import io
import logging
import pickle
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import orjson
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata, TensorStorageMetadata
from transformers import AutoConfig

from april.config import LearnerSection
from april.config.stored import CHECKSUMS_FILE, digest_of, format_checksums, parse_checksums
from april.learner.loading import ModelError
from april.learner.optimizers import DEFAULT, OPTIMIZERS
from april.learner.optimizers.base import PartOptimizer
from april.util.errors import refuse, toml_like
from april.util.files import read_whole, retried, sync

log = logging.getLogger(__name__)

COMPLETE_NAME = re.compile(r"step_(\d{6,})")
METADATA_FILE = ".metadata"
"""Name of the file that says where each shard of a checkpoint lies: torch's, a pickle."""
PROGRESS_FILE = "progress.json"
STEPS = "optimizer_steps"
WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|index\.json)")
OPTIMIZER, MASTER_WEIGHTS = "optimizer", "master_weights"


@dataclass
class CheckpointPart:
    """A trained sharded model with its optimizer: the policy or the critic."""

    prefix: str
    """Prefix of the part's tensor names in a checkpoint; empty for the policy."""
    model: Any
    """The sharded module; its property `trained` has the (name, parameter) pairs to store."""
    optimizer: PartOptimizer
    steps: int = 0
    """Number of optimizer steps so far that changed the weights."""

    @classmethod
    def of(cls, prefix: str, model: Any, lr: float, section: LearnerSection) -> Self:
        """The part that holds `model` and a new optimizer for it: the one that `section.optimizer` names, at the
        learning rate `lr`. `prefix`: put before the part's tensor names in a checkpoint, "" for the policy."""
        return cls(prefix, model, OPTIMIZERS.find(section.optimizer)(list(model.trained), lr, section))

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by their names in a checkpoint. Moments exist once the optimizer has made a step."""
        state = {}
        for name, parameter in self.model.trained:
            state[f"{self.prefix}model.{name}"] = parameter.detach()
            for moment, values in self.optimizer.moments(parameter).items():
                state[f"{self.prefix}{moment}.{name}"] = values
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Complete a restore: `state`, the tensors of `state()`, now has a checkpoint's values, and the optimizer takes
        its moments over from them. Weights need nothing more, since the tensors are the model's parameters
        themselves."""
        self.optimizer.loaded()


def steps(directory: Path) -> list[int]:
    """Policy steps of the complete checkpoints in `directory`, the oldest first."""

    def found() -> list[int]:
        if not directory.is_dir():
            return []
        names = (COMPLETE_NAME.fullmatch(path.name) for path in directory.iterdir() if (path / PROGRESS_FILE).is_file())
        return sorted(int(name[1]) for name in names if name)

    return retried(found)


def latest(directory: Path) -> int | None:
    """Policy step of the newest complete checkpoint; None without one."""
    return max(steps(directory), default=None)


def set_aside(directory: Path, step: int, damaged: Collection[str]) -> None:
    """Rename the damaged checkpoint of `step` so that it no longer counts as a checkpoint, and log its `damaged`
    files."""
    source = folder(directory, step)
    aside = source.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    retried(source.rename, aside)
    log.error(
        "checkpoint %s is damaged (%s), and set aside as %s: the one before it is taken, and the batches since "
        "then are trained again",
        source, ", ".join(damaged), aside.name, extra={"step": step},
    )  # fmt: skip


def damaged_files(source: Path) -> list[str]:
    """Files of a checkpoint that are missing or do not match their checksum. Raises OSError."""
    if not (source / CHECKSUMS_FILE).exists():
        log.warning("checkpoint %s has no %s: it is taken as it is", source, CHECKSUMS_FILE)
        return []
    named = checksums(source)
    return mismatched_files(named, source) if named else [CHECKSUMS_FILE]


def mismatched_files(named: Mapping[str, str], source: Path) -> list[str]:
    """Files in the list `named` (name -> digest) that are missing in the folder `source` or have another digest. Raises
    OSError if a file cannot be read, since it may be undamaged."""
    return [name for name, digest in named.items() if digest_of(source / name) != digest]


def checksums(source: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint, by file name; empty if the checkpoint's checksum list is missing or
    malformed."""
    sums = source / CHECKSUMS_FILE
    named = parse_checksums(read_whole(sums).decode(errors="replace")) if sums.exists() else {}
    return named if PROGRESS_FILE in named else {}


def write_checksums(source: Path, named: Mapping[str, str]) -> None:
    retried((source / CHECKSUMS_FILE).write_text, format_checksums(named))


def begin_folder(source: Path, named: Mapping[str, str]) -> None:
    """Replace the folder `source` by one that has only the checksum list `named`."""
    shutil.rmtree(source, ignore_errors=True)
    retried(lambda: source.mkdir(parents=True, exist_ok=True))
    write_checksums(source, named)


def folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def check_adapter(directory: Path, step: int, adapter: dict[str, Any]) -> None:
    """Raises ConfigError if the checkpoint of `step` was made with another configuration of `[lora]`."""
    before = orjson.loads(read_whole(folder(directory, step) / PROGRESS_FILE)).get("lora", {"rank": 0})
    before = {"embedding": False, "base": "fp32"} | before
    for key, value in before.items():
        if adapter.get(key, value) != value:
            refuse(
                f"lora.{key}",
                adapter[key],
                f"is not the {toml_like(value)} of checkpoint {folder(directory, step)}",
                f"go on with {toml_like(value)}, or begin another run",
            )


def check_critic(directory: Path, step: int, parts: Sequence[CheckpointPart]) -> None:
    """Raises ConfigError if the checkpoint of `step` lacks one of the parts, such as the critic."""
    progress = orjson.loads(read_whole(folder(directory, step) / PROGRESS_FILE))
    if any(f"{part.prefix}{STEPS}" not in progress for part in parts):
        refuse(
            "algorithm.advantage",
            None,
            f"wants a critic, which checkpoint {folder(directory, step)} does not have",
            "go on with an advantage that wants none, or begin another run",
        )


def check_optimizer(directory: Path, step: int, parts: Sequence[CheckpointPart]) -> None:
    """Raises ConfigError if the checkpoint of `step` has the moments of another optimizer than a part's, or weights of
    another dtype."""
    progress = orjson.loads(read_whole(folder(directory, step) / PROGRESS_FILE))
    for part in parts:
        for key, value, default in (
            (OPTIMIZER, part.optimizer.name, DEFAULT),
            (MASTER_WEIGHTS, part.optimizer.master_weights, "fp32"),
        ):
            if (before := progress.get(f"{part.prefix}{key}", default)) != value:
                refuse(
                    f"learner.{key}",
                    value,
                    f"is not the {before!r} of checkpoint {folder(directory, step)}, which would go on as another run",
                    f"go on with {before!r}, or begin another run",
                )


def allocate_state(source: Path, parts: Sequence[CheckpointPart]) -> dict[str, Tensor]:
    """Allocate the parts' tensors into which checkpoint `source` is to be loaded, by name in the checkpoint; also sets
    the parts' step counts."""
    progress = orjson.loads(read_whole(source / PROGRESS_FILE))
    for part in parts:
        part.steps = progress[f"{part.prefix}{STEPS}"]
        part.optimizer.restore(part.steps)
    return sharded_state(parts)


def read(source: Path, state: dict[str, Tensor], parts: Sequence[CheckpointPart]) -> None:
    """Load the tensors `state` of the parts from checkpoint `source`, on any number of ranks: each rank reads what it
    holds. Raises ModelError and OSError."""
    retried(read_tensors, source, state)
    for part in parts:
        part.load_state(state)


def read_tensors(source: Path, state: dict[str, Tensor]) -> None:
    """Load into the tensors `state` this process's shards of them from checkpoint `source`. Raises ModelError and
    OSError."""
    reader, planner, metadata = FileSystemReader(source), DefaultLoadPlanner(), read_metadata(source)
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def read_metadata(source: Path) -> Metadata:
    """Names, shapes and places of the tensors in the checkpoint `source`. Its pickle is read without executing
    anything, and may name nothing but tensors. Raises ModelError and OSError."""
    path = source / METADATA_FILE
    encoded = read_whole(path)
    try:
        metadata = MetadataUnpickler(io.BytesIO(encoded)).load()
    except Exception as error:  # what a malformed pickle raises has no bounds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path} cannot be read ({reason}); give it as it was saved") from error
    known = metadata.state_dict_metadata.values() if isinstance(metadata, Metadata) else [None]
    if not all(isinstance(value, TensorStorageMetadata) for value in known):
        raise ModelError(f"{path} names what is no tensor, which no checkpoint of April does; give it as it was saved")
    return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles a checkpoint's `.metadata` and refuses every class but those that describe tensors."""

    modules = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
    )
    """Names of the modules whose dataclasses and enums may be unpickled; these classes are plain data."""
    others: tuple[tuple[str, str], ...] = (
        (torch.__name__, "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # in Python 3.13
        ("collections", "OrderedDict"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member_of
        if (module, name) in self.others:
            return super().find_class(module, name)
        if module in (*self.modules, torch.__name__) and "." not in name:
            found = super().find_class(module, name)
            is_form = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            if isinstance(found, torch.dtype) or (is_form and module in self.modules):
                return found
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint has")


def member_of(form: Any, name: str) -> Enum:
    """The member `name` of the enum class `form`: Python 3.11.0 to 3.11.3 pickle it as `getattr(form, name)`. Raises
    UnpicklingError if `form` is anything but an enum class."""
    if not (isinstance(form, type) and issubclass(form, Enum) and name in form.__members__):
        raise pickle.UnpicklingError(f"it wants {name!r} of {form!r}, which is no enum's")
    return form[name]


def files_of_state(source: Path, state: dict[str, Tensor]) -> set[str]:
    """Names of the files of a checkpoint from which this rank's shards of `state` are read."""
    metadata, planner = read_metadata(source), DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    items = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


def sharded_state(parts: Sequence[CheckpointPart]) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name, sharded: trained weights and moments."""
    return {name: tensor for part in parts for name, tensor in part.state().items()}


def prune(directory: Path, keep: int, besides: Collection[int] = ()) -> None:
    """Remove all checkpoints but the newest `keep` and those of the steps `besides`, and partial ones left by
    crashes."""
    try:
        for step in steps(directory)[:-keep]:
            if step not in besides:
                retried(shutil.rmtree, folder(directory, step))
        for leftover in list(directory.glob("*.partial")):
            retried(shutil.rmtree, leftover)
    except OSError as error:
        log.warning("not all old checkpoints could be removed, which the next one tries again: %s", error)


def dtype_of_folder(folder: Path) -> torch.dtype | None:
    """Dtype that a Hugging Face folder's configuration names for its weights; None if it names none."""
    return AutoConfig.from_pretrained(folder).dtype


def replace_folder(complete: Path, final: Path) -> None:
    """Sync the folder `complete` to disk, then rename it to `final`, replacing an existing folder."""
    for path in retried(lambda: [*complete.rglob("*"), complete]):
        retried(sync, path)
    replaced = final.with_name(f"{final.name}.replaced.partial")
    shutil.rmtree(replaced, ignore_errors=True)
    if retried(final.exists):
        retried(final.rename, replaced)
    retried(complete.rename, final)
    retried(sync, final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
