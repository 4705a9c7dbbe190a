"""Resumable checkpoints of the sharded learner, and the policy as an ordinary Hugging Face folder.

A checkpoint is written under a temporary name and renamed when it is complete and on disk, so a folder
`step_000010` was whole when it got its name. It has the checksums of its files, `sha256sum -c SHA256SUMS` checks them,
and so does whoever goes on from it. Where ranks have disks of their own, each disk has a part of the files and the
checksums of all: `store.py` writes, finds and restores checkpoints on one disk or several.
"""

import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.optim import Optimizer
from transformers import AutoConfig, PreTrainedModel

from april.config import ConfigError
from april.files.disk import sync
from april.formats.stored import CHECKSUMS_FILE, digest_of, listed, listing
from april.learner.lora import save_adapter
from april.learner.model import Policy, gathered

log = logging.getLogger(__name__)

COMPLETE_NAME = re.compile(r"step_(\d{6,})")
PROGRESS_FILE = "progress.json"
STEPS = "optimizer_steps"
WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|index\.json)")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Part:
    """A sharded model that is trained, with its optimizer: its tensors have names of their own in a checkpoint."""

    prefix: str
    """of those names: none for the policy"""
    model: Any
    """has `trained`, parameters with their names"""
    optimizer: Optimizer
    steps: int = 0
    """of the optimizer, those left out that changed nothing"""

    def state(self) -> dict[str, Tensor]:
        """Its tensors, by their names in a checkpoint. Moments exist once the optimizer has made a step."""
        state = {}
        for name, parameter in self.model.trained:
            state[f"{self.prefix}model.{name}"] = parameter.detach()
            for moment in MOMENTS if parameter in self.optimizer.state else ():
                state[f"{self.prefix}{moment}.{name}"] = self.optimizer.state[parameter][moment]
        return state

    def take(self, state: dict[str, Tensor]) -> None:
        """Hold what has been put into a `state()` since: these are the very tensors."""


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, the oldest first."""
    if not directory.is_dir():
        return []
    names = (COMPLETE_NAME.fullmatch(path.name) for path in directory.iterdir() if (path / PROGRESS_FILE).is_file())
    return sorted(int(name[1]) for name in names if name)


def latest(directory: Path) -> int | None:
    """Step of the newest complete checkpoint, None without one."""
    return max(steps(directory), default=None)


def set_aside(directory: Path, step: int, damaged: Collection[str]) -> None:
    """Let the checkpoint of `step` be none any more, and say so."""
    source = folder(directory, step)
    aside = source.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    source.rename(aside)
    log.error(
        "checkpoint %s is damaged (%s), and set aside as %s: the one before it is taken, and the batches since "
        "then are trained again",
        source, ", ".join(damaged), aside.name, extra={"step": step},
    )  # fmt: skip


def damaged_files(source: Path) -> list[str]:
    """Those of a checkpoint that are missing, or not what was written."""
    if not (source / CHECKSUMS_FILE).exists():
        log.warning("checkpoint %s has no %s: it is taken as it is", source, CHECKSUMS_FILE)
        return []
    named = checksums(source)
    return others_than(named, source) if named else [CHECKSUMS_FILE]


def others_than(named: Mapping[str, str], source: Path) -> list[str]:
    """Files of a folder that are missing, or do not have the digest that is given with their names."""
    return [name for name, digest in named.items() if digest_of(source / name) != digest]


def checksums(source: Path) -> dict[str, str]:
    """By name, as the list of them says; none where it cannot be right, or is not there."""
    sums = source / CHECKSUMS_FILE
    named = listed(sums.read_text(errors="replace")) if sums.exists() else {}
    return named if PROGRESS_FILE in named else {}


def write_checksums(source: Path, named: Mapping[str, str]) -> None:
    (source / CHECKSUMS_FILE).write_text(listing(named))


def begin_folder(source: Path, named: Mapping[str, str]) -> None:
    """Have there be one for the files of such a list, with nothing but the list, in the place of what is there."""
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    write_checksums(source, named)


def folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def check_adapter(directory: Path, step: int, adapter: dict[str, Any]) -> None:
    """Raises ConfigError where the checkpoint of `step` is not of such an adapter, or such a model without one."""
    before = orjson.loads((folder(directory, step) / PROGRESS_FILE).read_bytes()).get("lora", {"rank": 0})
    before.setdefault("embedding", False)
    for key, value in before.items():
        if adapter.get(key, value) != value:
            raise ConfigError(
                f"key 'lora.{key}' = {adapter[key]} is not the {value} of checkpoint {folder(directory, step)}; go on "
                f"with {value}, or begin another run"
            )


def check_critic(directory: Path, step: int, parts: Sequence[Part]) -> None:
    """Raises ConfigError where the checkpoint of `step` lacks one of the parts."""
    progress = orjson.loads((folder(directory, step) / PROGRESS_FILE).read_bytes())
    if any(f"{part.prefix}{STEPS}" not in progress for part in parts):
        raise ConfigError(
            f"key 'algorithm.advantage' wants a critic, which checkpoint {folder(directory, step)} does not have; "
            "go on with an advantage that wants none, or begin another run"
        )


def place_for(source: Path, parts: Sequence[Part]) -> dict[str, Tensor]:
    """Tensors of the parts, by their names in a checkpoint, that its values can be put into."""
    progress = orjson.loads((source / PROGRESS_FILE).read_bytes())
    for part in parts:
        part.steps = progress[f"{part.prefix}{STEPS}"]
        part.optimizer.state.clear()
        for _, parameter in part.model.trained if part.steps else ():
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            count = torch.tensor(float(part.steps), device=parameter.device)
            part.optimizer.state[parameter] = {"step": count, **moments}
    return sharded_state(parts)


def read(source: Path, state: dict[str, Tensor], parts: Sequence[Part]) -> None:
    """Have the parts hold what a checkpoint says of `state`, on any number of ranks. Collective."""
    dcp.load(state, checkpoint_id=source)
    for part in parts:
        part.take(state)


def files_with(source: Path, state: dict[str, Tensor]) -> set[str]:
    """Those of a checkpoint that `state`, as this rank has it, is read from."""
    metadata, planner = FileSystemReader(source).read_metadata(), DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    items = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


def sharded_state(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name: what is trained."""
    return {name: tensor for part in parts for name, tensor in part.state().items()}


def prune(directory: Path, keep: int, besides: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those `besides`, and what crashes have left half-written."""
    for step in steps(directory)[:-keep]:
        if step not in besides:
            shutil.rmtree(folder(directory, step))
    for leftover in directory.glob("*.partial"):
        shutil.rmtree(leftover)


def export(lm: PreTrainedModel, state: dict[str, Tensor], source_folder: Path, out_dir: Path) -> None:
    """Write `out_dir`: `state`, weights of such a model as `lm`, with the source's configuration and tokenizer files.

    An existing `out_dir` is replaced when the new one is complete. Rank 0 writes; the others do not wait for it.
    """
    if dist.get_rank() == 0:
        write_model(lm, state, source_folder, out_dir)


def write_model(lm: PreTrainedModel, state: dict[str, Tensor], source_folder: Path, out_dir: Path) -> None:
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    lm.save_pretrained(partial, state_dict=state, save_original_format=False)
    for path in Path(source_folder).iterdir():
        if path.is_file() and not WEIGHT_FILES.fullmatch(path.name):
            shutil.copy(path, partial / path.name)
    replace_folder(partial, out_dir)


def type_of_files(folder: Path) -> torch.dtype | None:
    """Of the weights of a Hugging Face folder; None where it does not say."""
    return AutoConfig.from_pretrained(folder).dtype


def export_adapter(policy: Policy, adapter: dict[str, Any], base: Path, out_dir: Path) -> None:
    """Write `out_dir`, what is trained, as peft reads it, in the place of what is there. Collective, as `export`."""
    weights = gathered(policy.trained)
    if dist.get_rank() == 0:
        partial = out_dir.with_name(f"{out_dir.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        tied = {name: first for name, first in policy.lm.all_tied_weights_keys.items() if first in weights}
        save_adapter(partial, weights, tied, adapter, base)
        replace_folder(partial, out_dir)


def replace_folder(complete: Path, final: Path) -> None:
    """Put `complete` on disk and then under its final name, in the place of what is there."""
    for path in [*complete.rglob("*"), complete]:
        sync(path)
    replaced = final.with_name(f"{final.name}.replaced.partial")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    complete.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
