"""Work in threads while a batch trains: the next batch is prefetched, and the last weights are sent.

prefetcher.request(step)                        # returns at once
sender.start(step, weights, canary)             # returns at once
...                                             # train the previous batch
(batch, ready), wait_s = prefetcher.take()      # waits for the batch; None instead when the run is over
metrics = sender.finish()                       # waits until the weights are sent
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from april.learner.batch import ReceivedGroup, TrainingBatch, share_batch
from april.util.lifetime import in_background
from april.weights.base import AdapterWeights
from april.weights.canary import Canary
from april.weights.snapshot import Snapshot
from april.wire.message import Version
from april.wire.training import Discard

ALIVE_S = 1.0
"""Interval between calls of `BatchSource.alive` while the learner waits for a batch, seconds."""

Ready = TypeVar("Ready")


class BatchSource(Protocol):
    """Source of training batches, to which the learner also reports consumed batches and durable checkpoints.

    One thread calls `fetch` while another calls the other methods.
    """

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        """Start from weights `checkpoint_step`, whose checkpoint is on disk. Returns (incarnation, frontier): the
        number of this start of the learner, and the largest number of batches that any start of the learner has
        consumed.

        The weights contain every batch below `checkpoint_step`. Batches from there to the frontier (exclusive) were
        consumed before and are delivered again identically. After a crash between writing a checkpoint and reporting
        it, `checkpoint_step` is ahead of the last `durable` call and counts as one.
        """

    def fetch(self, step: int) -> TrainingBatch | None:
        """Wait for batch `step`, which is at most one ahead of the last consumed batch; None when the run is over."""

    leftover: list[ReceivedGroup]
    """Groups that were discarded, or held out for evaluation, after the last batch; known once `fetch` has returned
    None."""

    def alive(self) -> None:
        """Heartbeat while the learner waits for a batch, every `ALIVE_S` seconds."""

    def consumed(self, step: int, metrics: dict[str, float], discarded: Discard = "") -> None:
        """Report that batch `step` is in the weights, or was skipped for the reason `discarded`."""

    def durable(self, step: int, oldest: int) -> None:
        """Report that the checkpoint of weights `step` is on disk and `oldest` is the oldest one kept: batches below
        `oldest` are never needed again."""

    def best(self) -> tuple[int, list[int]]:
        """(policy step with the best held-out accuracy, or -1 if unknown; steps whose evaluation is still running).
        Called only with `evaluation.best`."""


Weights = Mapping[str, Tensor] | AdapterWeights | Snapshot
"""Weights to send, on the CPU by Hugging Face name: all weights, only the trained adapter, or rank 0's part."""


class Publisher(Protocol):
    """Interface through which the learner sends policy versions to the workers."""

    def publish(self, version: Version, weights: Weights, canary: Canary | None) -> dict[str, float]:
        """Send the weights to the workers; returns metrics of the publication. `canary`: a fixed text with the
        learner's log-probabilities under these weights, by which workers check what they received; None: they do not
        check it."""

    def announce(self, version: Version, canary: Canary | None) -> None:
        """Tell the workers to pause for a version that another process loads into their engines. `canary`: a fixed text
        with the log-probabilities that the engines must then give; None: the loaded weights are not checked."""

    def externally_loaded(self) -> dict[str, float]:
        """Confirm that the announced weights are loaded; returns metrics of the publication."""


class BatchPrefetcher(Generic[Ready]):
    """Fetches the next batch on rank 0, broadcasts and prepares it, in a thread while the current batch trains."""

    def __init__(
        self,
        source: BatchSource | None,
        group: dist.ProcessGroup | None,
        prepare: Callable[[TrainingBatch], Ready],
        check: Callable[[], None] = lambda: None,
    ):
        """`source` is None except on rank 0; `group` spans all ranks, None for a single rank. `prepare`: function
        (batch) -> prepared batch. `check` is called every `ALIVE_S` seconds while `take` waits; an exception that it
        raises ends the learner."""
        self.source, self.group, self.prepare, self.check = source, group, prepare, check
        self._fetching = False
        """Whether a call of `source.fetch` has not returned yet."""
        self._next: Future[tuple[TrainingBatch, Ready] | None]
        """Future of the last `request`: (batch, prepared batch), or None once the run is over."""

    def request(self, step: int) -> None:
        self._fetching = True
        self._next = in_background(self._fetch, step)

    def _fetch(self, step: int) -> tuple[TrainingBatch, Ready] | None:
        batch = self.source.fetch(step) if self.source else None
        self._fetching = False
        if self.group is not None:
            batch = share_batch(batch, self.group)
        if batch is None:
            return None
        if batch.step != step:
            raise ValueError(f"batch {batch.step} arrived where batch {step} was due; the source is out of step")
        return batch, self.prepare(batch)

    def take(self) -> tuple[tuple[TrainingBatch, Ready], float] | None:
        """Wait for the requested batch: ((batch, prepared batch), seconds waited); None when the run is over."""
        began = time.perf_counter()
        while not self._next.done():
            if self.source and self._fetching:
                self.source.alive()
            self.check()
            wait([self._next], ALIVE_S)
        result = self._next.result()
        return result and (result, time.perf_counter() - began)


class WeightSender:
    """Sends weights to the workers, in a thread while training goes on."""

    def __init__(self, publisher: Publisher | None, incarnation: int, frontier: int):
        """`publisher` is None except on rank 0. `incarnation`, `frontier`: from `BatchSource.start`. Weights of steps
        below the frontier come from batches that are trained again after a restart, and are not sent."""
        self.publisher, self.incarnation, self.frontier = publisher, incarnation, frontier
        self._sending: Future[dict[str, float]] | None = None

    def is_due(self, step: int) -> bool:
        return step >= self.frontier

    def start(self, step: int, weights: Weights, canary: Canary | None) -> None:
        """Start sending the weights of policy step `step`; `finish` must have been called for the weights before.
        `canary`: a fixed text with the learner's log-probabilities, for the workers' check; None: no check. Does
        nothing except on rank 0."""
        if self.publisher:
            self._sending = in_background(self._send, self.publisher, Version(self.incarnation, step), weights, canary)

    def _send(
        self, publisher: Publisher, version: Version, weights: Weights, canary: Canary | None
    ) -> dict[str, float]:
        began = time.perf_counter()
        return publisher.publish(version, weights, canary) | {"publish_s": time.perf_counter() - began}

    def announce(self, step: int, canary: Canary | None) -> None:
        if self.publisher:
            self.publisher.announce(Version(self.incarnation, step), canary)

    def externally_loaded(self) -> None:
        if self.publisher:
            self.publisher.externally_loaded()

    def finish(self) -> dict[str, float]:
        """Wait until the weights are sent; returns metrics of the publication, {} if nothing was being sent."""
        if self._sending is None:
            return {}
        began = time.perf_counter()
        sending, self._sending = self._sending, None
        return sending.result() | {"publish_wait_s": time.perf_counter() - began}
