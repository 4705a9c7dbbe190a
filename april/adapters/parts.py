"""What several adapters need: groups of one size, weights from a folder, a checkpoint that is on disk."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from april.files.disk import sync
from april.learner.batch import TrainSample


def filled(group: list[TrainSample], size: int) -> list[TrainSample]:
    """`size` samples: the trainer knows groups of one size alone, so one that has lost some has others twice."""
    return list(itertools.islice(itertools.cycle(group), size))


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Of a Hugging Face folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def sync_all(folder: Path) -> None:
    """Put a checkpoint on disk: TRL has only written it."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)
