"""Export of the policy as an ordinary Hugging Face folder, on the disk of rank 0, and of an adapter as peft's."""

import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from april.learner.checkpoint import WEIGHT_FILES, replace_folder
from april.learner.checkpoint_copies import Disks
from april.learner.lora import save_adapter
from april.learner.model import Policy, gather_tensors
from april.learner.process_group import long_wait_group
from april.learner.weight_parts import WeightTensor, gather_part, written_by_all
from april.util.files import retried, write_pieces
from april.weights.folders import INDEX_FILE, WrittenFile, index_of, write_tensors
from april.wire.message import Version


def export(lm: PreTrainedModel, state: dict[str, Tensor], source_folder: Path, out_dir: Path) -> None:
    """Write a Hugging Face folder `out_dir`: the weights `state` of model `lm`, with configuration and tokenizer files
    of `source_folder`.

    An existing `out_dir` is replaced once the new one is complete. Rank 0 writes; the others do not wait for it.
    """
    if dist.get_rank() == 0:
        retried(write_model, lm, state, source_folder, out_dir)


def write_model(lm: PreTrainedModel, state: dict[str, Tensor], source_folder: Path, out_dir: Path) -> None:
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    lm.save_pretrained(partial, state_dict=state, save_original_format=False)
    copy_other_files(source_folder, partial)
    replace_folder(partial, out_dir)


def export_parts(
    tensors: Sequence[WeightTensor], dtype: torch.dtype | None, source_folder: Path, out_dir: Path
) -> None:
    """Write a Hugging Face folder as `export` does: each rank gathers and writes a part of the weights, rank 0 the
    other files. What ranks have written on other disks is copied to that of rank 0. Raises OSError on every rank if one
    cannot write its part. `dtype`: type in which weights are written that have none of their own; None: float32.
    Collective; the others do not wait for rank 0's files."""
    part, rank = gather_part(Version(0, 0), tensors, dtype), dist.get_rank()
    disks, partial = Disks(out_dir.parent, long_wait_group()), out_dir.with_name(f"{out_dir.name}.partial")
    if disks.is_leader:
        shutil.rmtree(partial, ignore_errors=True)
    disks.barrier()

    def write() -> list[WrittenFile]:
        retried(lambda: partial.mkdir(parents=True, exist_ok=True))
        return write_tensors(part, rank, lambda name, pieces: retried(write_pieces, partial / name, pieces))

    by_rank = written_by_all(write, str(out_dir), disks.group)
    files = list(chain.from_iterable(by_rank))
    moves = disks.to_first_disk([[file.name for file in written] for written in by_rank])
    disks.transfer(moves, partial, {file.name: file.digest for file in files})
    if rank == 0:
        retried((partial / INDEX_FILE).write_bytes, index_of(files))
        retried(copy_other_files, source_folder, partial)
        replace_folder(partial, out_dir)
    elif disks.is_leader:
        shutil.rmtree(partial, ignore_errors=True)


def copy_other_files(source_folder: Path, target: Path) -> None:
    """Copy all files of a model's folder except its weights to the folder `target`."""
    for path in Path(source_folder).iterdir():
        if path.is_file() and not WEIGHT_FILES.fullmatch(path.name):
            shutil.copy(path, target / path.name)


def export_adapter(policy: Policy, adapter: dict[str, Any], base: str, out_dir: Path) -> None:
    """Write the trained tensors as a peft adapter folder, replacing `out_dir`. `adapter`: from `lora.describe`. `base`:
    folder or name of the base model. Collective; only rank 0 writes."""
    weights = gather_tensors(policy.trained)
    if dist.get_rank() == 0:
        tied = {name: first for name, first in policy.lm.all_tied_weights_keys.items() if first in weights}
        retried(write_adapter, weights, tied, adapter, base, out_dir)


def write_adapter(
    weights: dict[str, Tensor], tied: dict[str, str], adapter: dict[str, Any], base: str, out_dir: Path
) -> None:
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_adapter(partial, weights, tied, adapter, base)
    replace_folder(partial, out_dir)
