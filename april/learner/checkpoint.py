"""Resumable checkpoints of the sharded learner, and the policy as an ordinary Hugging Face folder.

A checkpoint is written under a temporary name and renamed when it is complete and on disk, so a folder
`step_000010` was whole when it got its name. It has the checksums of its files, `sha256sum -c SHA256SUMS` checks them,
and so does whoever goes on from it. All ranks must see the same file system.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoConfig

from april.config import ConfigError
from april.learner.background import in_background
from april.learner.lora import adapter_weights, save_adapter
from april.learner.model import Policy, full_state, gathered

log = logging.getLogger(__name__)

COMPLETE_NAME = re.compile(r"step_(\d{6,})")
PROGRESS_FILE = "progress.json"
CHECKSUMS_FILE = "SHA256SUMS"
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


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, the oldest first."""
    if not directory.is_dir():
        return []
    names = (COMPLETE_NAME.fullmatch(path.name) for path in directory.iterdir() if (path / PROGRESS_FILE).is_file())
    return sorted(int(name[1]) for name in names if name)


def latest(directory: Path) -> int | None:
    """Step of the newest complete checkpoint, None without one."""
    return max(steps(directory), default=None)


def newest_whole(directory: Path) -> int | None:
    """Step of the newest checkpoint whose files are what was written, None without one; newer ones are set aside."""
    for step in reversed(steps(directory)):
        source = folder(directory, step)
        if not (damaged := damaged_files(source)):
            return step
        aside = source.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        source.rename(aside)
        log.error(
            "checkpoint %s is damaged (%s), and set aside as %s: the one before it is taken, and the batches since "
            "then are trained again",
            source, ", ".join(damaged), aside.name, extra={"step": step},
        )  # fmt: skip
    return None


def damaged_files(source: Path) -> list[str]:
    """Those of a checkpoint that are missing, or not what was written."""
    sums = source / CHECKSUMS_FILE
    if not sums.exists():
        log.warning("checkpoint %s has no %s: it is taken as it is", source, CHECKSUMS_FILE)
        return []
    lines = sums.read_text(errors="replace").splitlines()
    named = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if PROGRESS_FILE not in named:
        return [CHECKSUMS_FILE]
    return [name for name, digest in named.items() if digest_of(source / name) != digest]


def digest_of(path: Path) -> str:
    """SHA-256 in hexadecimal; nothing of a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def write_checksums(complete: Path) -> None:
    files = sorted(path for path in complete.iterdir() if path.name != CHECKSUMS_FILE)
    (complete / CHECKSUMS_FILE).write_text("".join(f"{digest_of(path)}  {path.name}\n" for path in files))


def shared_latest(directory: Path) -> int | None:
    """`newest_whole` as rank 0 finds it, on every rank. Collective."""
    step = torch.tensor(-1)
    if dist.get_rank() == 0 and (found := newest_whole(directory)) is not None:
        step.fill_(found)
    dist.broadcast(step, src=0)
    return None if step.item() < 0 else int(step.item())


def folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


class Writer:
    """Writes one checkpoint at a time while training goes on: trained weights, AdamW moments and progress.

    The state is copied when a checkpoint is started; the ranks write the copies in threads, which agree over a process
    group of their own. `step` is also the position in the broker's stream: the next batch that the learner asks for.
    """

    def __init__(self, directory: Path, keep: int, timeout_s: float):
        """Keep the newest `keep`. Collective."""
        self.directory, self.keep = directory, keep
        self.kept_besides: set[int] = set()
        """steps that stay, too, however old"""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._writing: tuple[int, Future] | None = None

    def start(self, step: int, parts: Sequence[Part], adapter: dict[str, Any]) -> None:
        """Begin the checkpoint of `step`, after the one that is being written; `adapter` as `lora.describe` says it.
        Collective."""
        if self._writing:
            self._writing[1].result()
        partial = folder(self.directory, step).with_suffix(".partial")
        if dist.get_rank() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        written = dcp.async_save(sharded_state(parts), checkpoint_id=partial, process_group=self.group)
        if dist.get_rank() == 0:
            progress = {"step": step, "ranks": dist.get_world_size(), "lora": adapter}
            progress |= {f"{part.prefix}{STEPS}": part.steps for part in parts}
            written = in_background(self._complete, written, partial, progress)
        self._writing = step, written

    def _complete(self, written: Future, partial: Path, progress: dict[str, Any]) -> None:
        """Rank 0's, in a thread: that its write is over means that all are."""
        written.result()
        (partial / PROGRESS_FILE).write_bytes(orjson.dumps(progress))
        write_checksums(partial)
        replace_folder(partial, folder(self.directory, progress["step"]))
        self.prune()

    def prune(self) -> None:
        """Remove what need not be kept."""
        prune(self.directory, self.keep, self.kept_besides)

    def completed(self, wait: bool = False) -> int | None:
        """Step of the checkpoint that was started last, once, when it is on disk. Raises what went wrong."""
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        (step, written), self._writing = self._writing, None
        written.result()
        return step


def check_adapter(directory: Path, step: int, adapter: dict[str, Any]) -> None:
    """Raises ConfigError where the checkpoint of `step` is not of such an adapter, or such a model without one."""
    before = orjson.loads((folder(directory, step) / PROGRESS_FILE).read_bytes()).get("lora", {"rank": 0})
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


def restore(directory: Path, step: int, parts: Sequence[Part]) -> None:
    """Load the checkpoint of `step` in place, on any number of ranks. Collective."""
    source = folder(directory, step)
    progress = orjson.loads((source / PROGRESS_FILE).read_bytes())
    for part in parts:
        part.steps = progress[f"{part.prefix}{STEPS}"]
        part.optimizer.state.clear()
        for _, parameter in part.model.trained if part.steps else ():
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            count = torch.tensor(float(part.steps), device=parameter.device)
            part.optimizer.state[parameter] = {"step": count, **moments}
    dcp.load(sharded_state(parts), checkpoint_id=source)


def sharded_state(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name: what is trained. Moments exist once the optimizer has made a step."""
    state = {}
    for part in parts:
        for name, parameter in part.model.trained:
            state[f"{part.prefix}model.{name}"] = parameter.detach()
            for moment in MOMENTS if parameter in part.optimizer.state else ():
                state[f"{part.prefix}{moment}.{name}"] = part.optimizer.state[parameter][moment]
    return state


def prune(directory: Path, keep: int, besides: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those `besides`, and what crashes have left half-written."""
    for step in steps(directory)[:-keep]:
        if step not in besides:
            shutil.rmtree(folder(directory, step))
    for leftover in directory.glob("*.partial"):
        shutil.rmtree(leftover)


def export(policy: Policy, source_folder: Path, out_dir: Path) -> None:
    """Write `out_dir`: the weights in the source's own type, with its configuration and tokenizer files. Collective.

    An existing `out_dir` is replaced when the new one is complete. Rank 0 writes; the others do not wait for it.
    """
    state = full_state(policy, AutoConfig.from_pretrained(source_folder).dtype)
    if dist.get_rank() == 0:
        partial = out_dir.with_name(f"{out_dir.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        policy.lm.save_pretrained(partial, state_dict=state, save_original_format=False)
        for path in Path(source_folder).iterdir():
            if path.is_file() and not WEIGHT_FILES.fullmatch(path.name):
                shutil.copy(path, partial / path.name)
        replace_folder(partial, out_dir)


def export_adapter(policy: Policy, adapter: dict[str, Any], base: Path, out_dir: Path) -> None:
    """Write `out_dir`, the adapter alone, as peft reads it, in the place of what is there. Collective, as `export`."""
    weights = gathered(adapter_weights(policy.lm))
    if dist.get_rank() == 0:
        partial = out_dir.with_name(f"{out_dir.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_adapter(partial, weights, adapter, base)
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


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
