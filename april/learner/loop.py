"""The learner's life: restore, announce, then fetch, train, checkpoint, report and publish until the run is over."""

import logging
import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from april.config import Config
from april.learner.batch import Batch, share_batch
from april.learner.process_group import handover_group
from april.learner.trainer import Trainer
from april.version import Version

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where batches come from, and where the learner reports what has become of them."""

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        """The learner holds weights `checkpoint_step`, whose checkpoint is on disk -> (branch, frontier).

        They contain every batch below `checkpoint_step`. Batches from there to the frontier have been consumed
        before and are handed out again identically. After a crash between a checkpoint and its reports,
        `checkpoint_step` is ahead of what `consumed` and `durable` have said, and stands for both.
        """

    def fetch(self, step: int) -> Batch | None:
        """Wait for batch `step`; None when the run is over."""

    def consumed(self, step: int, metrics: dict[str, float]) -> None:
        """Batch `step` is in the weights."""

    def durable(self, step: int, oldest: int) -> None:
        """The checkpoint of weights `step` is on disk, and the oldest that is kept is `oldest`: the batches below
        that are never needed again."""


class Publisher(Protocol):
    def publish(self, version: Version, tensors: dict[str, Tensor]) -> dict[str, float]:
        """Hand the weights (on the CPU, by Hugging Face name) to the workers; figures about it."""


def run(config: Config, trainer: Trainer, source: Source | None, publisher: Publisher | None) -> None:
    """Train until `source.fetch` gives None. Collective; `source` and `publisher` are rank 0's, None elsewhere.

    Batch k turns weights k into k + 1. After it: the checkpoint if one is due, `consumed(k)`, `durable(k + 1)` if
    there was a checkpoint, then Version(branch, k + 1) is published, unless it is below the frontier. At the
    end the last weights get a checkpoint if they have none, and are exported.

    The metrics given to `consumed` add to the trainer's: `wait_s` for the batch, `train_s`, `checkpoint_s` if
    one was written, and of the latest publish before this batch `publish_s` with the publisher's own figures.
    """
    group = handover_group()
    saved_step = trainer.restore()
    branch, frontier = share_numbers(source.start(saved_step) if source else (0, 0), group)
    publish_metrics = {}
    if trainer.step_count >= frontier:
        publish_metrics = publish(trainer, publisher, branch)
    while True:
        step, began = trainer.step_count, time.perf_counter()
        batch = share_batch(source.fetch(step) if source else None, group)
        if batch is None:
            break
        if batch.step != step:
            raise ValueError(f"batch {batch.step} arrived where batch {step} was due; the source is out of step")
        arrived = time.perf_counter()
        metrics = trainer.step(batch)
        trained = time.perf_counter()
        metrics |= publish_metrics | {"wait_s": arrived - began, "train_s": trained - arrived}
        due = trainer.step_count % config.learner.checkpoint_every == 0
        if due:
            trainer.save()
            saved_step = trainer.step_count
            metrics["checkpoint_s"] = time.perf_counter() - trained
        if source:
            seconds, loss = metrics["train_s"], metrics["loss"]
            log.info("batch %d trained in %.2f s, loss %.4f", step, seconds, loss, extra={"step": step})
            source.consumed(step, metrics)
            if due:
                source.durable(saved_step, trainer.oldest_checkpoint)
        publish_metrics = {}
        if trainer.step_count >= frontier:
            publish_metrics = publish(trainer, publisher, branch)
    if saved_step != trainer.step_count:
        trainer.save()
        if source:
            source.durable(trainer.step_count, trainer.oldest_checkpoint)
    trainer.export()


def publish(trainer: Trainer, publisher: Publisher | None, branch: int) -> dict[str, float]:
    """Gather and publish the trainer's weights; the publisher's figures and `publish_s`, {} on other ranks."""
    began = time.perf_counter()
    tensors = trainer.weights()
    if publisher is None:
        return {}
    metrics = publisher.publish(Version(branch, trainer.step_count), tensors)
    return {**metrics, "publish_s": time.perf_counter() - began}


def share_numbers(numbers: tuple[int, ...], group: dist.ProcessGroup) -> tuple[int, ...]:
    """Rank 0's integers on every rank of `group`; the others pass as many."""
    tensor = torch.tensor(numbers)
    dist.broadcast(tensor, src=0, group=group)
    return tuple(tensor.tolist())
