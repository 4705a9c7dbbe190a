"""The learner's checkpoints, on one disk that all its ranks see, or on several, and perhaps in an object store.

On one disk a checkpoint is on disk once. With several each rank writes its files on its own disk, and another rank
copies them to the next disk. Then any one disk may be lost. Each disk has the small files and the checksums of all.
With an object store each rank puts its files there instead (`copies.py`), and all disks may be lost.

store = Store(directory, keep, timeout_s)
store.start(step, parts, adapter)               # in threads, beside the training
step = store.completed()                        # on every disk, and its copies where they have to be
found = store.newest()                          # at the start: the newest that disks and copies hold together
store.restore(found, parts)                     # each disk is brought what its ranks read
"""

import hashlib
import logging
import platform
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from april.formats.stored import StoredCheckpoints
from april.learner import checkpoint
from april.learner.background import in_background
from april.learner.checkpoint import CHECKSUMS_FILE, PROGRESS_FILE, STEPS, Part, folder
from april.learner.copies import Copies, InStore, OnNextDisk
from april.learner.disks import Disks
from april.learner.holdings import Found, Held, found_in, lacking, nowhere

log = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
SMALL_FILES = (METADATA_FILE, PROGRESS_FILE)
"""what every disk has of a checkpoint"""


class Store:
    """Writes one checkpoint at a time while training goes on: trained weights, AdamW moments and progress.

    The state is copied when a checkpoint is started; the ranks write the copies in threads, which agree over a process
    group of their own. `step` is also the position in the broker's stream: the next batch that the learner asks for.
    """

    def __init__(self, directory: Path, keep: int, timeout_s: float, stored: StoredCheckpoints | None = None):
        """Keep the newest `keep`. Collective."""
        timeout_s += stored.objects.patience_s if stored else 0
        self.directory, self.keep = directory, keep
        self.kept_besides: set[int] = set()
        """steps that stay, too, however old, as rank 0 says"""
        self.figures: dict[str, float] = {}
        """of its writing, for the metrics of a step"""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.disks = Disks(directory, self.group)
        self.copies: Copies = InStore(stored, self.disks) if stored else OnNextDisk(self.disks)
        if self.disks.rank == 0 and self.disks.count > 1 and not stored:
            said = "the ranks see %d disks; each file of a checkpoint lies on two, and what is exported on that of %s"
            log.info(said, self.disks.count, platform.node())
        self._writing: tuple[int, Future] | None = None

    def start(self, step: int, parts: Sequence[Part], adapter: dict[str, Any]) -> None:
        """Begin the checkpoint of `step`, after the one that is being written; `adapter` as `lora.describe` says it.
        Collective."""
        if self._writing:
            self._writing[1].result()
        partial = folder(self.directory, step).with_suffix(".partial")
        if self.disks.leads:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        written = dcp.async_save(checkpoint.sharded_state(parts), checkpoint_id=partial, process_group=self.group)
        progress = {"step": step, "ranks": dist.get_world_size(), "lora": adapter}
        progress |= {f"{part.prefix}{STEPS}": part.steps for part in parts}
        self._writing = step, in_background(self._complete, written, partial, progress)

    def _complete(self, written: Future, partial: Path, progress: dict[str, Any]) -> None:
        """In a thread of each rank. Nothing is removed before every disk has the whole of its part."""
        written.result()
        rank = self.disks.rank
        own = [path.name for path in partial.glob(f"__{rank}_*")] + [METADATA_FILE] * (rank == 0)
        digests = {name: checkpoint.digest_of(partial / name) for name in own}
        told = self.disks.told((digests, self.kept_besides, self.copies.retries))
        named = {name: digest for digests, *_ in told for name, digest in digests.items()}
        self.disks.carry(self.disks.from_first(METADATA_FILE), partial, named)
        said = orjson.dumps(progress)
        named[PROGRESS_FILE] = hashlib.sha256(said).hexdigest()
        if self.disks.leads:
            (partial / PROGRESS_FILE).write_bytes(said)
        by_rank = [sorted(digests.keys() - {METADATA_FILE}) for digests, *_ in told]
        self.copies.add(progress["step"], partial, by_rank, named)
        if self.disks.leads:
            checkpoint.write_checksums(partial, named)
            checkpoint.replace_folder(partial, folder(self.directory, progress["step"]))
        self.disks.meet()
        _, besides, _ = told[0]
        if retries := [of_rank for *_, of_rank in told if of_rank is not None]:
            self.figures = {"checkpoint_store_retries": sum(retries)}
        self.prune(besides)

    def prune(self, besides: Collection[int]) -> None:
        """Remove what need not be kept, on every disk and of the copies."""
        if self.disks.leads:
            checkpoint.prune(self.directory, self.keep, besides)
        self.copies.prune(self.keep, besides)

    def completed(self, wait: bool = False) -> int | None:
        """Step of the checkpoint that was started last, once, when it is on disk. Raises what went wrong."""
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        (step, written), self._writing = self._writing, None
        written.result()
        return step

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole; newer ones are set aside. None without one. Collective."""
        while (step := max(self._steps(), default=None)) is not None:
            own, held = self._look(step)
            if found := found_in(step, held, self.disks.of_rank):
                return self._made_ready(found, own)
            if self.disks.leads and own:
                checkpoint.set_aside(self.directory, step, nowhere(own.sums, held) or [CHECKSUMS_FILE])
            self.copies.set_aside(step)
        return None

    def _steps(self) -> set[int]:
        """Of all disks and copies. Collective."""
        there = checkpoint.steps(self.directory) if self.disks.leads else []
        return {step for each in self.disks.told(there) for step in each} | self.copies.steps()

    def find(self, step: int) -> Found | None:
        """The checkpoint of `step`, with its small files on every disk, None where it is not whole. It is read from end
        to end. Collective."""
        own, held = self._look(step)
        found = found_in(step, held, self.disks.of_rank)
        return found and self._made_ready(found, own)

    def _made_ready(self, found: Found, own: Held | None) -> Found:
        """Its small files are on every disk, and none that is damaged on this one."""
        source = folder(self.directory, found.step)
        if own and own.sums == found.sums:
            for name in own.damaged:
                log.error("%s is damaged; its copy is taken", source / name, extra={"step": found.step})
                (source / name).unlink()
        if self.disks.leads and self.disks.own not in found.listed:
            if own:
                log.warning("%s is not of the checkpoint that is gone on from; it is replaced", source)
            checkpoint.begin_folder(source, found.sums)
        self.disks.meet()
        self._bring(found, SMALL_FILES, [SMALL_FILES] * self.disks.count)
        self.copies.mend(found, source)
        return found

    def _look(self, step: int) -> tuple[Held | None, list[Held | None]]:
        """What this rank holds of a checkpoint: its share of what is on its disk, and what a copy has brought; and what
        each rank does. Collective."""
        source = folder(self.directory, step)
        own = self._held(source)
        own = self.copies.bring(step, source, own, self.disks.told(own))
        return own, self.disks.told(own)

    def _held(self, source: Path) -> Held | None:
        if not source.is_dir():
            return None
        if not (source / CHECKSUMS_FILE).exists() and (source / PROGRESS_FILE).exists():
            log.warning("checkpoint %s has no %s: it is taken as it is", source, CHECKSUMS_FILE)
            there = {path.name: checkpoint.digest_of(path) for path in source.iterdir()}
            return Held(there, there)
        named = checkpoint.checksums(source)
        share = {name: named[name] for name in self.disks.share(sorted(named))}
        others = checkpoint.others_than(share, source)
        return Held(named, share.keys() - others, [name for name in others if (source / name).exists()])

    def restore(self, found: Found, parts: Sequence[Part]) -> None:
        """Load it in place, on any number of ranks. Collective."""
        source = folder(self.directory, found.step)
        state = checkpoint.place_for(source, parts)
        if self.disks.count > 1:
            told = self.disks.told(checkpoint.files_with(source, state))
            by_disk = [set().union(*map(told.__getitem__, self.disks.ranks(disk))) for disk in range(self.disks.count)]
            self._bring(found, found.sums.keys() - SMALL_FILES, by_disk)
        checkpoint.read(source, state, parts)

    def _bring(self, found: Found, names: Collection[str], needed: Sequence[Collection[str]]) -> None:
        """Of these files to each disk what it needs, and of all of them a second copy if disks have those."""
        moves = lacking({name: found.disks[name] for name in names}, needed, self.copies.on_disks)
        self.disks.carry(self.disks.between_ranks(moves), folder(self.directory, found.step), found.sums)
