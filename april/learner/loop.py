"""The learner's main loop: restore and publish, then fetch, train, report, checkpoint and publish until the run ends.

While a batch trains, threads prefetch and prepare the next one, send the last weights to the workers, and write a
checkpoint.
"""

import logging
import time
from pathlib import Path
from typing import Protocol

import orjson
import torch
import torch.distributed as dist

from april.config import Config
from april.learner.batch import TrainingBatch, encode
from april.learner.prefetch import BatchPrefetcher, BatchSource, Publisher, WeightSender
from april.learner.process_group import long_wait_group
from april.learner.publication import DividedSending, WeightPublication
from april.learner.samples import SampleWriter
from april.learner.snapshot_writing import SnapshotWriting
from april.learner.time_sharing import TimeSlice
from april.learner.trainer import Trainer
from april.util.files import retried
from april.util.pulse import MAIN

log = logging.getLogger(__name__)

NONE = -1
"""Number that stands for "no policy step"."""


class Diverged(RuntimeError):
    """Raised after `learner.max_nonfinite` batches in a row whose loss or gradient was not finite."""


class Publication(Protocol):
    """Publishes the weights of each new step, beginning with those that a run starts from."""

    def publish(self) -> dict[str, float]:
        """Start to publish the trainer's current weights; returns metrics: seconds of each part of the work.
        Collective."""

    def finish(self) -> dict[str, float]:
        """Wait until the publication is done; returns its metrics."""


def run(
    config: Config,
    trainer: Trainer,
    source: BatchSource | None,
    publisher: Publisher | None,
    time_slice: TimeSlice | None = None,
    divided: DividedSending | None = None,
    publication: Publication | None = None,
    snapshots: SnapshotWriting | None = None,
) -> None:
    """Train until `source.fetch` returns None. Collective; `source` and `publisher` are None except on rank 0.

    Batch k turns weights k into weights k + 1. After it the loop calls `consumed(k)`, starts a checkpoint if one is due
    and calls `durable` once it is on disk, and publishes Version(incarnation, k + 1) unless k + 1 is below the frontier
    (the number of batches that the learner had consumed before it was restarted). At the end the last weights are
    checkpointed and exported, and the best by `evaluation.best` are exported too. A batch whose loss or gradient is not
    finite is stored in `nonfinite/` of the run folder and skipped; the unchanged weights are published as the next
    version. `Diverged` is raised after `learner.max_nonfinite` such batches in a row.

    `time_slice` is the learner's share of an accelerator that it shares with engines, already acquired; it is released
    while the learner waits for a batch. `divided`: the ranks as senders of a part of the weights each; None: rank 0
    sends all. `snapshots`: the ranks as writers of snapshots, which workers read; None: weights are sent.
    `publication`: what happens to new weights; None: they are sent to workers by `publisher`, or written.

    While rank 0 waits for the broker or writes the last files, the other ranks wait for it in a process group with a
    timeout of days, not in the collectives of the next step.

    `consumed` gets the trainer's metrics and, in seconds: `wait_s` for the batch, `publish_wait_s` for the last weights
    to be sent, `canary_s` to score the canary, `gather_s` to gather the weights, `checkpoint_s` to copy the state,
    `train_s`; and `publish_s` with the publisher's own metrics of the weights that batch k was trained on.
    """
    prefetch_group, main_group = long_wait_group(), long_wait_group()
    saved_step = trainer.restore()
    incarnation, frontier = broadcast_integers(source.start(saved_step) if source else (0, 0), prefetch_group)
    retain_best(trainer, source)
    check = divided.check if divided else lambda: None
    prefetcher = BatchPrefetcher(source, prefetch_group, trainer.prepare, check)
    if publication is None:
        publication = WeightPublication(trainer, WeightSender(publisher, incarnation, frontier), divided, snapshots)
    nonfinite_in_a_row = 0
    prefetcher.request(trainer.step_count)
    publication.publish()
    time_slice = time_slice or TimeSlice(config, trainer.device, dist.get_rank())
    time_slice.release(trainer)
    costs: dict[str, float] = {}
    sample_writer = SampleWriter(config) if source else None
    while arrived := prefetcher.take():
        (batch, ready), wait_s = arrived
        if time_slice.is_shared:  # engines load weights only in a time slice of their own
            costs |= publication.finish()
            MAIN.at("waiting for the other ranks")
            dist.barrier(main_group)
        costs |= time_slice.acquire(main_group)
        MAIN.at("training")
        prefetcher.request(batch.step + 1)
        began = time.perf_counter()
        metrics = trainer.step(batch, ready)
        pace_step(config, began, metrics["tokens"])
        metrics |= costs | {"wait_s": wait_s, "train_s": time.perf_counter() - began} | publication.finish()
        metrics |= trainer.checkpoints.metrics
        nonfinite_in_a_row = nonfinite_in_a_row + 1 if metrics["nonfinite"] else 0
        if source:
            report(config, source, batch, metrics)
        if sample_writer and trainer.token_stats:
            MAIN.at("keeping samples", takes_long=True)
            scores = dict(zip(ready.prepared.batch_indices, trainer.token_stats.per_sample(), strict=True))
            sample_writer.keep(batch, ready.prepared.batch_advantages, scores, bool(metrics["nonfinite"]))
        elif sample_writer:
            sample_writer.keep_untrained(batch.step, batch.untrained)
        report_durable(trainer, source)
        MAIN.at("waiting for the other ranks")
        dist.barrier(main_group)
        costs = {}
        if is_checkpoint_due(config, trainer.step_count):
            began = time.perf_counter()
            finish_checkpoint(trainer, source, main_group)
            if sample_writer:
                sample_writer.finish()
            MAIN.at("copying a checkpoint", takes_long=True)
            trainer.start_save()
            saved_step = trainer.step_count
            costs["checkpoint_s"] = time.perf_counter() - began
        costs |= publication.publish()
        time_slice.release(trainer)
        if nonfinite_in_a_row == config.learner.max_nonfinite:
            raise Diverged(
                f"{nonfinite_in_a_row} batches in a row had a loss or gradient that is not finite; the last is "
                f"{nonfinite_path(config, batch.step)}; lower learner.lr, or raise learner.max_nonfinite = "
                f"{config.learner.max_nonfinite} to go on for longer"
            )
    publication.finish()
    time_slice.acquire(main_group)
    if sample_writer and source:
        sample_writer.keep_untrained(trainer.step_count, source.leftover)
        sample_writer.finish()
    finish_checkpoint(trainer, source, main_group)
    if saved_step != trainer.step_count:
        trainer.start_save()
        finish_checkpoint(trainer, source, main_group)
    MAIN.at("exporting the policy", takes_long=True)
    trainer.export()
    if config.evaluation.best:
        (best,) = broadcast_integers((best_step(source),), main_group)
        trainer.export_best(best)
    dist.barrier(main_group)


def is_checkpoint_due(config: Config, step: int) -> bool:
    """Whether weights `step` get a checkpoint: every `learner.checkpoint_every` steps, and with `evaluation.best` also
    at every evaluated step."""
    evaluation = config.evaluation
    may_be_best = evaluation.best and evaluation.every and step % evaluation.every == 0
    return bool(may_be_best) or step % config.learner.checkpoint_every == 0


def retain_best(trainer: Trainer, source: BatchSource | None) -> None:
    """Protect from pruning the best checkpoint so far by `evaluation.best`, and checkpoints whose evaluation is still
    running. `source` tells which these are; None, as on all ranks but rank 0: does nothing."""
    if source and trainer.config.evaluation.best:
        best, undecided = source.best()
        trainer.checkpoints.also_kept_steps = {best, *undecided}


def best_step(source: BatchSource | None) -> int:
    """Policy step of the best weights by `evaluation.best`, -1 if unknown. `source`: None except on rank 0; the result
    is then -1, so only rank 0's counts."""
    best, _ = source.best() if source else (NONE, [])
    return best


def pace_step(config: Config, began: float, tokens: float) -> None:
    """Sleep until the step has taken `tokens` * `learner.pace_token_s` seconds: simulates a slower learner. `began`:
    start of the step (`time.perf_counter`, seconds). `tokens`: metric `tokens` of the step."""
    time.sleep(max(0.0, began + tokens * config.learner.pace_token_s - time.perf_counter()))


def report(config: Config, source: BatchSource, batch: TrainingBatch, metrics: dict[str, float]) -> None:
    """Report a batch to the source as consumed; store it in `nonfinite/` if its loss or gradient is not finite."""
    seconds, loss = metrics["train_s"], metrics["loss"]
    step = batch.step + 1
    log.info("step %d trained in %.2f s, loss %.4f", step, seconds, loss, extra={"step": step})
    if not metrics["nonfinite"]:
        return source.consumed(batch.step, metrics)
    path = nonfinite_path(config, batch.step)
    log.error("the loss or gradient of batch %d is not finite: see %s", batch.step, path, extra={"step": batch.step})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        retried(path.write_bytes, encode(batch))
        retried(path.with_suffix(".json").write_bytes, orjson.dumps(metrics, option=orjson.OPT_INDENT_2))
    except OSError as error:
        log.warning("the batch is not stored: %s", error)
    source.consumed(batch.step, metrics, "nonfinite")


def nonfinite_path(config: Config, step: int) -> Path:
    """Path of a stored batch whose loss or gradient was not finite (MessagePack, see `april.learner.batch.encode`); a
    .json file beside it has the metrics."""
    return config.run_dir / "nonfinite" / f"step_{step:06d}.msgpack"


def report_durable(trainer: Trainer, source: BatchSource | None, wait: bool = False) -> None:
    """Report to `source` the checkpoint, if any, that has reached the disk since the last call. `wait`: first wait for
    a checkpoint that is being written. `source`: None except on rank 0; the others only wait."""
    step = trainer.saved(wait)
    if source and step is not None:
        source.durable(step, trainer.oldest_checkpoint)
        retain_best(trainer, source)


def finish_checkpoint(trainer: Trainer, source: BatchSource | None, main_group: dist.ProcessGroup) -> None:
    """Wait until the checkpoint that is being written, if any, is on disk, and report it to `source`. Collective: all
    ranks meet in `main_group` at the end; `source` is None except on rank 0."""
    MAIN.at("waiting for a checkpoint", takes_long=True)
    report_durable(trainer, source, wait=True)
    MAIN.at("waiting for the other ranks")
    dist.barrier(main_group)


def broadcast_integers(numbers: tuple[int, ...], group: dist.ProcessGroup) -> tuple[int, ...]:
    """Broadcast rank 0's integers to every rank of `group`; the others pass a tuple of the same length. Collective."""
    tensor = torch.tensor(numbers)
    dist.broadcast(tensor, src=0, group=group)
    return tuple(tensor.tolist())
