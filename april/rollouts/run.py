"""A trainer's end of a run: batches in order, what became of them, and weights for the workers.

    connect -> publish -> batch 0 -> consumed(0), publish -> batch 1 -> ... -> close

Under torchrun every rank makes the same calls in the same order. Rank 0 talks to the broker and to the workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import torch
import torch.distributed as dist

from april import config as configuration
from april.config import Config
from april.learner.batch import Batch
from april.learner.beside import Handover, Publisher, Sending, Source
from april.learner.loop import share_numbers
from april.learner.process_group import handover_group
from april.learner.source import BrokerSource
from april.registry import look_in
from april.rollouts.batch import RolloutBatch, to_tensors
from april.rollouts.local import LocalRun
from april.rollouts.weights import Weights, canary_of, collect
from april.security.keys import load_keys
from april.weights.publisher import WeightPublisher
from april.wire.training import Discard

LOCAL = "local"


class WatchfulSource(BrokerSource):
    """One that looks after a local run while it waits."""

    local: LocalRun | None = None

    def alive(self) -> None:
        super().alive()
        if self.local:
            self.local.check()


class Rollouts:
    """What `connect` gives. Use it in a `with` block, in one thread."""

    def __init__(
        self,
        config: Config,
        checkpoint: int,
        source: Source | None,
        publisher: Publisher | None,
        group: dist.ProcessGroup | None = None,
    ):
        """`source` and `publisher` are rank 0's, None elsewhere; `group`: over all ranks."""
        self.config = config
        self.step = checkpoint
        """of the weights that the trainer holds: the number of batches in them"""
        self.over = False
        """whether all batches have been handed out"""
        self._source = source
        branch, frontier = source.start(checkpoint) if source else (0, 0)
        if group is not None:
            branch, frontier = share_numbers((branch, frontier), group)
        self.frontier = frontier
        """batches below it were handed out before, and come again as they were"""
        self._handover = Handover(source, group, self._to_tensors)
        self._sending = Sending(publisher, branch, frontier)
        self._published = -1
        self._consumed = checkpoint
        self._wait_s = 0.0

    def _to_tensors(self, batch: Batch) -> RolloutBatch:
        return to_tensors(batch, self.config.algorithm.advantage)

    def batches(self) -> Iterator[RolloutBatch]:
        """Each batch once, relative to `durable`, until the run is over. Collective.

        Asking for the next says `consumed` of the last where that was not said. RuntimeError where its weights were
        not published, for which the workers would wait for ever.
        """
        while True:
            self._require_published()
            self._handover.ask(self.step)
            arrived = self._handover.take()
            if arrived is None:
                self.over = True
                return
            (_, batch), self._wait_s = arrived
            self.step = batch.checkpoint
            yield batch
            if self._consumed < self.step:
                self.consumed(batch)

    def _require_published(self) -> None:
        if self._sending.is_due(self.step) and self._published < self.step:
            raise RuntimeError(
                f"weights {self.step} have not been published, and the workers wait for them; call run.publish(model) "
                "before the first batch and after each"
            )

    def consumed(
        self, batch: RolloutBatch, metrics: Mapping[str, float] | None = None, discarded: Discard = ""
    ) -> None:
        """`batch` is in the weights; or it was passed without changing them, because it is `discarded`."""
        self._consumed = batch.checkpoint
        if self._source:
            self._source.consumed(batch.step, {"wait_s": self._wait_s} | dict(metrics or {}), discarded)

    def publish(self, weights: Weights) -> dict[str, float]:
        """Begin to send the weights as they are now to the workers, once those before have arrived; figures about
        those. Collective.

        `weights`: a module, a state dictionary, or (name, tensor) pairs; sharded tensors are collected. Names are those
        of the Hugging Face folder. Weights of batches that are trained again are not sent.
        """
        figures = self._sending.finish()
        if self._sending.is_due(self.step):
            canary = canary_of(weights, self.config)
            self._sending.start(self.step, collect(weights, keep=self._source is not None), canary)
        self._published = self.step
        return figures

    def durable(self, batch: RolloutBatch, oldest: int | None = None) -> None:
        """A checkpoint that contains `batch` is on disk; `oldest`: the step of the oldest checkpoint that is kept, by
        default this one's. Batches below that are never handed out again."""
        if self._source:
            self._source.durable(batch.checkpoint, batch.checkpoint if oldest is None else oldest)

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if kind is None:
            self._sending.finish()


class Connection(Rollouts):
    """One with a broker, which it leaves at the end of the block; a local run ends with it."""

    def __init__(
        self,
        config: Config,
        checkpoint: int,
        source: WatchfulSource | None,
        publisher: WeightPublisher | None,
        group: dist.ProcessGroup | None,
    ):
        self._broker, self._lanes = source, publisher
        super().__init__(config, checkpoint, source, publisher, group)

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._broker and self._lanes:
                self._broker.close()
                self._lanes.close()
                leave(self._broker.local, finished=self.over and kind is None)


def leave(local: LocalRun | None, finished: bool) -> None:
    if local and finished:
        local.wait()
    elif local:
        local.stop()


def connect(
    config: str | Path | Sequence[Path],
    checkpoint: int = 0,
    run: str = LOCAL,
    overrides: Mapping[str, Any] | None = None,
) -> Rollouts:
    """Take the learner's place in the run that the TOML file describes.

    `checkpoint`: the step of the weights that the trainer holds, 0 for those of `model.path`; a saved checkpoint's is
    `batch.checkpoint`. `run`: "local" starts broker and workers here, and goes on with the run's folder where there is
    one; tcp://HOST:PORT is that of a broker that runs already. `overrides`: keys as {"schedule.max_steps": 8}.

    Under torchrun every rank calls it, with a default process group. Raises ConfigError, BrokerUnreachable,
    BrokerRefused (for a checkpoint of batches that nobody keeps any more), LocalRunFailed.
    """
    paths = [Path(config)] if isinstance(config, str | Path) else [Path(one) for one in config]
    words = [word for key, value in (overrides or {}).items() for word in (f"--{key}", as_word(value))]
    look_in(*(path.parent for path in paths))
    loaded = configuration.load(paths, words, inputs=["model"])
    group = handover_group() if dist.is_available() and dist.is_initialized() else None
    if group is not None and dist.get_rank() > 0:
        return Connection(loaded, checkpoint, None, None, group)
    local = LocalRun(loaded, paths, words) if run == LOCAL else None
    try:
        address = local.address() if local else configuration.check_address(run)
        keys = loaded.security.keys
        device = "cuda" if torch.cuda.is_available() else "cpu"
        publisher = WeightPublisher(loaded.weights, loaded.run.name, device, keys)
        source = WatchfulSource(address, publisher.address, loaded.broker.patience_s, load_keys(keys, "learner"))
        source.local = local
        return Connection(loaded, checkpoint, source, publisher, group)
    except BaseException:
        leave(local, finished=False)
        raise


def as_word(value: Any) -> str:
    """As on the command line: TOML."""
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
