"""The learner's checkpoints: on one disk shared by all ranks or on several, optionally with copies in an object store.

On a shared disk each file exists once. With several disks each rank writes its files on its own disk and another rank
copies them to the next disk, so any single disk may be lost. Every disk has the small files and all checksums. With an
object store each rank uploads its files instead (`checkpoint_copies.py`), and all disks may be lost.

store = CheckpointStore(directory, keep, timeout_s)
store.start(step, parts, adapter)               # in threads, while training goes on
step = store.completed()                        # once it is on every disk and its copies exist
found = store.newest()                          # at the start: the newest that disks and copies have completely
store.restore(found, parts)                     # each disk gets the files that its ranks read
"""

import hashlib
import logging
import platform
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from april.config.stored import StoredCheckpoints
from april.learner import checkpoint
from april.learner.checkpoint import (
    CHECKSUMS_FILE,
    MASTER_WEIGHTS,
    METADATA_FILE,
    OPTIMIZER,
    PROGRESS_FILE,
    STEPS,
    CheckpointPart,
    folder,
)
from april.learner.checkpoint_copies import (
    CheckpointCopies,
    Disks,
    FoundCheckpoint,
    NeighbourDiskCopies,
    ObjectStoreCopies,
    RankInventory,
    find_checkpoint,
    missing_files,
    plan_transfers,
)
from april.util.files import retried
from april.util.lifetime import in_background

log = logging.getLogger(__name__)

SMALL_FILES = (METADATA_FILE, PROGRESS_FILE)
"""Names of the small files of a checkpoint, of which every disk has a copy."""


# --- shards -----------------------------------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=0)]


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor that a rank holds, as ranks tell each other before they write a checkpoint."""

    name: str
    """Name of the whole tensor in the checkpoint."""
    offset: tuple[Count, ...]
    """Index of the part's first element in the whole tensor."""
    sizes: tuple[Count, ...]
    """Shape of the part."""
    shape: tuple[Count, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Name of the dtype in `torch`."""
    is_whole: bool
    """Whether the tensor is not sharded, so that the rank holds it whole."""

    @classmethod
    def from_item(cls, item: WriteItem) -> "Shard":
        held = item.tensor_data
        assert held, "a checkpoint has tensors alone"
        dtype = str(held.properties.dtype).removeprefix("torch.")
        chunk = held.chunk
        is_whole = item.type is WriteItemType.TENSOR
        return cls(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tuple(held.size), dtype, is_whole)

    def item(self) -> WriteItem:
        """The shard as torch's `WriteItem`. Raises ValueError if torch has no dtype with the name `dtype`."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a rank has a tensor of {self.dtype!r}, which is no dtype")
        chunk = ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.sizes))
        held = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(self.shape))
        kind = WriteItemType.TENSOR if self.is_whole else WriteItemType.SHARD
        return WriteItem(MetadataIndex(self.name, self.offset), kind, tensor_data=held)


class StoredShard(msgspec.Struct, frozen=True, array_like=True):
    """Place of a shard that a rank has written, as it tells the other ranks."""

    name: str
    offset: tuple[Count, ...]
    place: Count | None
    """Index that torch gives the shard among those of its tensor; None if it gives none."""
    file: Annotated[str, msgspec.Meta(pattern=r"^__\d+_\d+\.distcp$")]
    start: Count
    """Position of the shard's first byte in the file."""
    length: Count
    """Number of bytes that the stored shard takes in the file."""
    tensor_bytes: Count
    """Number of bytes of the shard's values in memory."""

    @classmethod
    def from_result(cls, result: WriteResult) -> "StoredShard":
        index, stored = result.index, result.storage_data
        offset = tuple(index.offset or ())
        place = stored.relative_path, stored.offset, stored.length
        return cls(index.fqn, offset, index.index, *place, result.size_in_bytes)

    def result(self) -> WriteResult:
        """The stored shard as torch's `WriteResult`."""
        index = MetadataIndex(self.name, self.offset, self.place)
        return WriteResult(index, self.tensor_bytes, _StorageInfo(self.file, self.start, self.length))


def write_shards(target: Path, state: dict[str, Tensor], disks: Disks) -> None:
    """Write this rank's shards of `state` into the folder `target`, and on rank 0 the file that says where every
    shard lies. The format is torch's; each rank makes the same plan from the shards of all. Raises OSError if a rank
    could not write. Collective."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(target)
    planner.set_up_planner(state, writer.storage_meta(), disks.rank == 0)
    writer.set_up_storage_writer(disks.rank == 0)
    own = [Shard.from_item(item) for item in retried(writer.prepare_local_plan, planner.create_local_plan()).items]
    plans = []
    for shards in disks.all_gather(own, list[Shard]):
        names = {shard.name: (shard.name,) for shard in shards}
        plans.append(SavePlan([shard.item() for shard in shards], planner_data=names))
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[disks.rank])
    stored: list[StoredShard] | str
    try:
        stored = retried(lambda: list(map(StoredShard.from_result, write_files(writer, plan, planner))))
    except Exception as error:
        log.exception("a checkpoint's files cannot be written")
        stored = f"rank {disks.rank} cannot write {target}: {error}"
    by_rank = disks.all_gather(stored, list[StoredShard] | str)
    for reason in by_rank:
        if isinstance(reason, str):
            raise OSError(reason)
    if disks.rank == 0:
        results = [[shard.result() for shard in shards] for shards in by_rank]  # type: ignore[union-attr]
        retried(writer.finish, metadata, results)


def write_files(writer: FileSystemWriter, plan: SavePlan, planner: DefaultSavePlanner) -> list[WriteResult]:
    """Write the files of a rank's plan. Raises OSError if a write fails, for which torch raises RuntimeError."""
    try:
        return writer.write_data(plan, planner).wait()
    except RuntimeError as error:
        raise OSError(str(error)) from error


def copy_to_memory(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of sharded tensors, by name, in the memory of this machine. torch's own stager takes ten times as long."""

    def copied(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        own = tensor.to_local().detach().to("cpu", copy=True)
        return DTensor(own, tensor._spec, requires_grad=False)  # on the CPU, whatever the device of its mesh

    return {name: copied(tensor) for name, tensor in state.items()}


# --- checkpoints ------------------------------------------------------------------------------------------------------


class CheckpointStore:
    """Writes one checkpoint at a time while training goes on: trained weights, AdamW moments and progress.

    Starting a checkpoint copies the state; each rank writes its copy in a thread, with collectives in a process group
    of their own. The `step` of a checkpoint is also the number of the batch that the learner asks for next.
    """

    def __init__(self, directory: Path, keep: int, timeout_s: float, stored: StoredCheckpoints | None = None):
        """`keep`: number of newest checkpoints that are kept. `timeout_s`: timeout of collectives, seconds. `stored`:
        object store that gets copies of the checkpoints; None: if there are several disks, each file is on two of them.
        Collective."""
        timeout_s += stored.objects.patience_s if stored else 0
        self.directory, self.keep = directory, keep
        self.also_kept_steps: set[int] = set()
        """Policy steps whose checkpoints are never pruned, whatever their age; only rank 0's value is used."""
        self.metrics: dict[str, float] = {}
        """Metrics of the checkpoint written last, by name, reported with the next step."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.disks = Disks(directory, self.group)
        self.copies: CheckpointCopies = (
            ObjectStoreCopies(stored, self.disks) if stored else NeighbourDiskCopies(self.disks)
        )
        if self.disks.rank == 0 and self.disks.count > 1 and not stored:
            message = (
                "the ranks see %d disks; each file of a checkpoint is on two, and exported models are on that of %s"
            )
            log.info(message, self.disks.count, platform.node())
        self._writing: tuple[int, Future] | None = None

    def start(self, step: int, parts: Sequence[CheckpointPart], adapter: dict[str, Any]) -> None:
        """Start the checkpoint of `step`, after waiting for one that is being written; `adapter` is from
        `lora.describe`. Collective."""
        if self._writing:
            self._writing[1].result()
        partial = folder(self.directory, step).with_suffix(".partial")
        if self.disks.is_leader:
            retried(lambda: self.directory.mkdir(parents=True, exist_ok=True))
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        state = copy_to_memory(checkpoint.sharded_state(parts))
        progress = {"step": step, "ranks": dist.get_world_size(), "lora": adapter}
        for part in parts:
            progress |= {
                f"{part.prefix}{STEPS}": part.steps,
                f"{part.prefix}{OPTIMIZER}": part.optimizer.name,
                f"{part.prefix}{MASTER_WEIGHTS}": part.optimizer.master_weights,
            }
        self._writing = step, in_background(self._write, state, partial, progress)

    def _write(self, state: dict[str, Tensor], partial: Path, progress: dict[str, Any]) -> None:
        """Write a checkpoint, in a thread of each rank: shards of `state`, checksums, copies, rename of the folder
        `partial`, then pruning of older ones. Nothing is removed before every disk has the files of this checkpoint.
        `progress`: content of its progress file."""
        write_shards(partial, state, self.disks)
        rank = self.disks.rank
        own = [path.name for path in retried(lambda: list(partial.glob(f"__{rank}_*")))]
        own += [METADATA_FILE] * (rank == 0)
        digests = {name: checkpoint.digest_of(partial / name) for name in own}
        report = digests, self.also_kept_steps, self.copies.retries
        reports = self.disks.all_gather(report, tuple[dict[str, str], set[int], int | None])
        named = {name: digest for digests, *_ in reports for name, digest in digests.items()}
        self.disks.transfer(self.disks.from_rank_0(METADATA_FILE), partial, named)
        encoded = orjson.dumps(progress)
        named[PROGRESS_FILE] = hashlib.sha256(encoded).hexdigest()
        if self.disks.is_leader:
            retried((partial / PROGRESS_FILE).write_bytes, encoded)
        by_rank = [sorted(digests.keys() - {METADATA_FILE}) for digests, *_ in reports]
        self.copies.add(progress["step"], partial, by_rank, named)
        if self.disks.is_leader:
            checkpoint.write_checksums(partial, named)
            checkpoint.replace_folder(partial, folder(self.directory, progress["step"]))
        self.disks.barrier()
        _, besides, _ = reports[0]
        if retries := [count for *_, count in reports if count is not None]:
            self.metrics = {"checkpoint_store_retries": sum(retries)}
        self.prune(besides)

    def prune(self, besides: Collection[int]) -> None:
        """Remove all checkpoints but the newest `keep` (given to the constructor) and those of the steps `besides`, on
        every disk and among the copies."""
        if self.disks.is_leader:
            checkpoint.prune(self.directory, self.keep, besides)
        self.copies.prune(self.keep, besides)

    def completed(self, wait: bool = False) -> int | None:
        """Step of the checkpoint started last, returned exactly once after it reached the disk; otherwise None. `wait`:
        wait until it has. Re-raises an error of the writing thread."""
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        (step, written), self._writing = self._writing, None
        written.result()
        return step

    def newest(self) -> FoundCheckpoint | None:
        """The newest complete checkpoint; newer damaged ones are set aside. None without one. Collective."""
        while (step := max(self._steps(), default=None)) is not None:
            own, inventories = self._take_inventory(step)
            if found := find_checkpoint(step, inventories, self.disks.disk_of_rank):
                return self._prepare_restore(found, own)
            if self.disks.is_leader and own:
                checkpoint.set_aside(self.directory, step, missing_files(own.sums, inventories) or [CHECKSUMS_FILE])
            self.copies.set_aside(step)
        return None

    def _steps(self) -> set[int]:
        """Policy steps of the checkpoints that any disk or any copy has. Collective."""
        local_steps = checkpoint.steps(self.directory) if self.disks.is_leader else []
        return {step for each in self.disks.all_gather(local_steps, list[int]) for step in each} | self.copies.steps()

    def find(self, step: int) -> FoundCheckpoint | None:
        """The checkpoint of `step`, with its small files on every disk; None if it is not complete. All its files are
        read to verify their checksums. Collective."""
        own, inventories = self._take_inventory(step)
        found = find_checkpoint(step, inventories, self.disks.disk_of_rank)
        return found and self._prepare_restore(found, own)

    def _prepare_restore(self, found: FoundCheckpoint, own: RankInventory | None) -> FoundCheckpoint:
        """Remove this disk's damaged files of a checkpoint, as its inventory `own` names them, and copy the
        checkpoint's small files to every disk. Collective."""
        source = folder(self.directory, found.step)
        if own and own.sums == found.sums:
            for name in own.damaged:
                log.error("%s is damaged; its copy is taken", source / name, extra={"step": found.step})
                retried((source / name).unlink)
        if self.disks.is_leader and self.disks.own not in found.listed:
            if own:
                log.warning("%s is not of the checkpoint that is gone on from; it is replaced", source)
            checkpoint.begin_folder(source, found.sums)
        self.disks.barrier()
        self._transfer(found, SMALL_FILES, [SMALL_FILES] * self.disks.count)
        self.copies.repair(found, source)
        return found

    def _take_inventory(self, step: int) -> tuple[RankInventory | None, list[RankInventory | None]]:
        """Inventories of the checkpoint `step`: this rank's (its share of the files on its disk and files fetched from
        copies), and those of all ranks, by rank; None for a rank that has nothing of the checkpoint. Collective."""
        source = folder(self.directory, step)
        own = retried(self._own_inventory, source)
        own = self.copies.fetch_missing(step, source, own, self.disks.all_gather(own, RankInventory | None))
        return own, self.disks.all_gather(own, RankInventory | None)

    def _own_inventory(self, source: Path) -> RankInventory | None:
        if not source.is_dir():
            return None
        if not (source / CHECKSUMS_FILE).exists() and (source / PROGRESS_FILE).exists():
            log.warning("checkpoint %s has no %s: it is taken as it is", source, CHECKSUMS_FILE)
            digests = {path.name: checkpoint.digest_of(path) for path in source.iterdir()}
            return RankInventory(digests, list(digests))
        named = checkpoint.checksums(source)
        share = {name: named[name] for name in self.disks.share(sorted(named))}
        mismatched = checkpoint.mismatched_files(share, source)
        return RankInventory(
            named, share.keys() - mismatched, [name for name in mismatched if (source / name).exists()]
        )

    def restore(self, found: FoundCheckpoint, parts: Sequence[CheckpointPart]) -> None:
        """Load a checkpoint into the parts, on any number of ranks. Collective."""
        source = folder(self.directory, found.step)
        state = checkpoint.allocate_state(source, parts)
        if self.disks.count > 1:
            files_by_rank = self.disks.all_gather(checkpoint.files_of_state(source, state), set[str])
            by_disk = [
                set().union(*map(files_by_rank.__getitem__, self.disks.ranks(disk))) for disk in range(self.disks.count)
            ]
            self._transfer(found, found.sums.keys() - SMALL_FILES, by_disk)
        checkpoint.read(source, state, parts)

    def _transfer(self, found: FoundCheckpoint, names: Collection[str], needed: Sequence[Collection[str]]) -> None:
        """Copy the files `names` between disks: each disk gets those that it needs, `needed[disk]`, and each file gets
        a copy on a second disk if copies are kept on disks (`CheckpointCopies.on_disks`). Collective."""
        moves = plan_transfers({name: found.disks[name] for name in names}, needed, self.copies.on_disks)
        self.disks.transfer(self.disks.assign_ranks(moves), folder(self.directory, found.step), found.sums)
