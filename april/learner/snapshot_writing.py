"""Snapshots of weights for workers that read them (`weights.transport` = "pull"): each rank of the learner gathers a
part of a version and writes it while the next step trains; rank 0 adds the small files and tells the broker."""

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from april.config import Config
from april.config.stored import CHECKSUMS_FILE
from april.learner.checkpoint import WEIGHT_FILES
from april.learner.process_group import all_gather_values, long_wait_group
from april.learner.trainer import Trainer
from april.learner.weight_parts import gather_part, written_by_all
from april.util.errors import refuse
from april.util.files import read_whole
from april.util.lifetime import in_background
from april.util.objects import StoreError
from april.weights import TRANSPORTS
from april.weights.canary import Canary
from april.weights.folders import KEPT, SnapshotFolders
from april.weights.snapshot import Snapshot, pack
from april.wire.message import Version
from april.wire.training import WeightFolder

log = logging.getLogger(__name__)

NOT_TAKEN = re.compile(rf"\..*|.*\.(h5|msgpack|ot|onnx)|{CHECKSUMS_FILE}")
"""Regular expression for names of files of a model's folder, beside its weights, that are not copied into a snapshot:
hidden files, weights for other libraries, and the checksum list, since a snapshot has one of its own."""
MOST_BYTES = 4 * 2**20
"""Largest size in bytes of a file of a model's folder that is copied into a snapshot; files of a tokeniser may be
larger."""
TOKENIZERS = re.compile(r"(tokenizer|vocab|merges|added_tokens|spiece|sentencepiece|tekken).*|.*\.(model|tiktoken)")
"""Regular expression for names of a tokeniser's files in a model's folder."""


class SnapshotWriting:
    """The ranks of a learner that write snapshots of weights."""

    def __init__(self, config: Config, tell: Callable[[WeightFolder], None] | None):
        """`tell`: function that tells the broker of a written snapshot; None on all ranks but 0. Raises ConfigError if
        `weights.folder` cannot be used. Collective."""
        self.config, self.tell = config, tell
        self.folders = SnapshotFolders.of(config)
        self.group = long_wait_group()  # a rank may write for as long as its store lets bytes through
        self.others = model_files(config.model.path) if tell else {}
        """Content of the files that a snapshot has beside the weights, such as the tokeniser's, by file name; only on
        rank 0."""
        self._last_step: int | None = None
        """Policy step of the snapshot written last; None before the first."""
        self._written = 0
        self._base: Snapshot | None = None
        """This rank's part of the snapshot written last, if the next one is a delta to it; None if the next one is
        written whole, as by a learner that has just started."""
        self._chains: list[list[WeightFolder]] = []
        """The last snapshots announced to the broker, at most `KEPT`, each preceded by those that it is a delta to;
        only on rank 0."""
        self._writing: Future[dict[str, float]] | None = None
        problem = self._problem() if dist.get_rank() == 0 else ""
        if reason := all_gather_values(problem, str, self.group)[0]:
            fix = "mend the key, or the rights of the learner there"
            refuse("weights.folder", None, f"cannot be used: {reason}", fix)
        if tell:
            log.info("weights are written to %s, where workers read them", self.folders.objects.url)

    @classmethod
    def start(cls, config: Config, tell: Callable[[WeightFolder], None] | None) -> "SnapshotWriting | None":
        """Make the writer of snapshots; None if the transport (`weights.transport`) is not one by which workers read
        snapshots. `tell`: as in the constructor. Collective."""
        return cls(config, tell) if TRANSPORTS.find(config.weights.transport).pulls else None

    def _problem(self) -> str:
        """The reason why `weights.folder`, into which snapshots are written, cannot be used; "" if it can."""
        try:
            self.folders.objects.probe()
        except StoreError as error:
            return str(error)
        return ""

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of the weights of `step` is to be written: for the first weights that this process
        publishes, and for each step that `weights.every` divides."""
        return self._last_step is None or step % self.config.weights.every == 0

    def gather(self, trainer: Trainer, version: Version) -> Snapshot:
        """This rank's part of the current weights, as those of `version`. If the weights cannot be divided among ranks,
        rank 0's part is all of them. Collective."""
        self._last_step = version.step
        tensors = trainer.backend.divisible_weights()
        if tensors is None:
            return pack(version, trainer.weights())
        return gather_part(version, tensors, trainer.generation_dtype)

    def start_writing(self, part: Snapshot, canary: Canary | None) -> None:
        """Write a snapshot in a thread; the previous one must be finished. `part`: this rank's; `canary`: put into the
        snapshot, None for none."""
        self._writing = in_background(self._write, replace(part, canary=canary))

    def finish(self) -> dict[str, float]:
        """Wait until the snapshot is written and the broker knows of it; returns metrics by name, {} if none was being
        written. Raises OSError if a rank could not write its part, and StoreError if the object store or folder of the
        snapshots fails."""
        if self._writing is None:
            return {}
        began = time.perf_counter()
        writing, self._writing = self._writing, None
        return writing.result() | {"publish_wait_s": time.perf_counter() - began}

    # --- the thread of each rank ----------------------------------------------------------------------------

    def _write(self, part: Snapshot) -> dict[str, float]:
        """Write this rank's part and, on rank 0, complete the snapshot. Collective, in a group of its own."""
        began, rank = time.perf_counter(), dist.get_rank()
        write = partial(self.folders.write_part, part, rank, self._base)
        files = list(chain.from_iterable(written_by_all(write, f"weights {part.version}", self.group)))
        if self.tell:
            rests_on = self._chains[-1] if self._base else []
            folder = self.folders.complete(part.version, files, part.canary, self.others, rests_on)
            self.tell(folder)
            self._chains = [*self._chains, [*rests_on, folder]][-KEPT:]
            self._prune()
        self._written += 1
        weights = self.config.weights
        self._base = part if weights.delta == "auto" and self._written % weights.whole_every else None
        size = sum(file.size for file in files)
        return {"publish_bytes": size, "publish_s": time.perf_counter() - began}

    def _prune(self) -> None:
        try:
            kept = {folder.version for chain in self._chains for folder in chain}
            weights = self.config.weights
            links = weights.whole_every if weights.delta == "auto" else 1  # each has a deadline of its own
            self.folders.prune(kept, links * weights.transfer_deadline_s)
        except StoreError as error:
            log.warning("not all old snapshots could be removed, which the next one tries again: %s", error)


def model_files(folder: Path) -> dict[str, bytes]:
    """Content of the files of a model's folder that belong into a snapshot beside the weights, by name."""
    return {path.name: read_whole(path) for path in sorted(Path(folder).iterdir()) if is_taken(path)}


def is_taken(path: Path) -> bool:
    """Whether a file of a model's folder is copied into a snapshot: it has no weights, its name is not in `NOT_TAKEN`,
    and it has at most `MOST_BYTES` unless it is a tokeniser's."""
    if not path.is_file() or WEIGHT_FILES.fullmatch(path.name) or NOT_TAKEN.fullmatch(path.name):
        return False
    return bool(TOKENIZERS.fullmatch(path.name)) or path.stat().st_size <= MOST_BYTES
