"""What goes on beside the training of a batch: the next is fetched, and the last weights are sent.

handover.ask(step)
sending.start(step, weights, canary)
...                                             # train the batch before
(batch, ready), wait_s = handover.take()
figures = sending.finish()
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from april.learner.background import in_background
from april.learner.batch import Batch, ToldGroup, share_batch
from april.weights.base import Adapted
from april.weights.canary import Canary
from april.wire.training import Discard
from april.wire.version import Version

ALIVE_S = 1.0
"""the source hears this often that the learner waits for a batch of it, and does not hang"""

Ready = TypeVar("Ready")


class Source(Protocol):
    """Where batches come from, and where the learner reports what has become of them.

    `fetch` is called by one thread while another calls the rest.
    """

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        """The learner holds weights `checkpoint_step`, whose checkpoint is on disk -> (branch, frontier).

        They contain every batch below `checkpoint_step`. Batches from there to the frontier have been consumed
        before and are handed out again identically. After a crash between a checkpoint and its reports,
        `checkpoint_step` is ahead of what `durable` has said, and stands for it.
        """

    def fetch(self, step: int) -> Batch | None:
        """Wait for batch `step`, which may be one ahead of the batches consumed; None when the run is over."""

    left: list[ToldGroup]
    """where the run has failed, what was discarded since the last batch, if samples are kept"""

    def alive(self) -> None:
        """The learner waits for what it has asked for, and lives; said every `ALIVE_S`."""

    def consumed(self, step: int, metrics: dict[str, float], discarded: Discard = "") -> None:
        """Batch `step` is in the weights, or was passed without changing them because it is `discarded`."""

    def durable(self, step: int, oldest: int) -> None:
        """The checkpoint of weights `step` is on disk, and the oldest that is kept is `oldest`: the batches below
        that are never needed again."""

    def best(self) -> tuple[int, list[int]]:
        """Step of the weights that were the most accurate on held-out prompts, -1 where none are known, and those that
        may turn out to be; asked with `evaluation.best` alone."""


Weights = Mapping[str, Tensor] | Adapted
"""all of them, on the CPU, by Hugging Face name, or what is trained in their place"""


class Publisher(Protocol):
    def publish(self, version: Version, weights: Weights, canary: Canary | None) -> dict[str, float]:
        """Hand the weights to the workers, and what they are known by; figures about it."""

    def announce(self, version: Version, canary: Canary | None) -> None:
        """Have the workers stop for weights that others bring."""

    def brought(self) -> dict[str, float]:
        """They are there; figures about it."""


class Handover(Generic[Ready]):
    """Fetches the next batch on rank 0, shares it with all and makes it ready, in a thread beside the training."""

    def __init__(self, source: Source | None, group: dist.ProcessGroup | None, prepare: Callable[[Batch], Ready]):
        """`source` is rank 0's, None elsewhere; `group`: over all ranks, None where there is one alone."""
        self.source, self.group, self.prepare = source, group, prepare
        self._asked = False
        """the source has not answered yet"""
        self._next: Future[tuple[Batch, Ready] | None]
        """of the last `ask`"""

    def ask(self, step: int) -> None:
        self._asked = True
        self._next = in_background(self._fetch, step)

    def _fetch(self, step: int) -> tuple[Batch, Ready] | None:
        batch = self.source.fetch(step) if self.source else None
        self._asked = False
        if self.group is not None:
            batch = share_batch(batch, self.group)
        if batch is None:
            return None
        if batch.step != step:
            raise ValueError(f"batch {batch.step} arrived where batch {step} was due; the source is out of step")
        return batch, self.prepare(batch)

    def take(self) -> tuple[tuple[Batch, Ready], float] | None:
        """The batch that was asked for, and the seconds waited for it; None when the run is over."""
        began = time.perf_counter()
        while not self._next.done():
            if self.source and self._asked:
                self.source.alive()
            wait([self._next], ALIVE_S)
        arrived = self._next.result()
        return arrived and (arrived, time.perf_counter() - began)


class Sending:
    """Sends weights to the workers, in a thread beside the training."""

    def __init__(self, publisher: Publisher | None, branch: int, frontier: int):
        """`publisher` is rank 0's, None elsewhere. Weights below the frontier are those of batches that are trained
        again, and nobody needs them."""
        self.publisher, self.branch, self.frontier = publisher, branch, frontier
        self._sending: Future[dict[str, float]] | None = None

    def is_due(self, step: int) -> bool:
        return step >= self.frontier

    def start(self, step: int, weights: Weights, canary: Canary | None) -> None:
        """Begin with weights `step`; what was sent before has to be finished."""
        if self.publisher:
            self._sending = in_background(self._send, self.publisher, Version(self.branch, step), weights, canary)

    def _send(
        self, publisher: Publisher, version: Version, weights: Weights, canary: Canary | None
    ) -> dict[str, float]:
        began = time.perf_counter()
        return publisher.publish(version, weights, canary) | {"publish_s": time.perf_counter() - began}

    def announce(self, step: int, canary: Canary | None) -> None:
        if self.publisher:
            self.publisher.announce(Version(self.branch, step), canary)

    def brought(self) -> None:
        if self.publisher:
            self.publisher.brought()

    def finish(self) -> dict[str, float]:
        """Wait for what is being sent; figures about it."""
        if self._sending is None:
            return {}
        began = time.perf_counter()
        sending, self._sending = self._sending, None
        return sending.result() | {"publish_wait_s": time.perf_counter() - began}
