"""Helpers shared by several adapters: groups of equal size, weights from a folder, checkpoints synced to disk."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from april.learner.batch import TrainSample
from april.util.files import sync


def fill_group(group: list[TrainSample], size: int) -> list[TrainSample]:
    """Repeat samples of a group that has lost some, up to `size`, for trainers that need groups of equal size."""
    return list(itertools.islice(itertools.cycle(group), size))


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a Hugging Face folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def sync_folder(folder: Path) -> None:
    """Sync a checkpoint's files and folders to disk, which trainers do not do when they write it."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)
