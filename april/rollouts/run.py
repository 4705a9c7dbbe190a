"""A trainer's end of a run: batches in order, what became of them, and weights for the workers.

    connect -> publish -> batch 0 -> consumed(0), publish -> batch 1 -> ... -> close

Under torchrun every rank makes the same calls in the same order. Rank 0 talks to the broker and to the workers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import orjson
import torch
import torch.distributed as dist

from april import config as configuration
from april.config import Config, ConfigError
from april.config.checks import needs_norms, needs_values
from april.connections.address import address_at
from april.learner.batch import Batch
from april.learner.beside import Handover, Publisher, Sending, Source
from april.learner.loop import share_numbers
from april.learner.process_group import handover_group
from april.learner.source import BrokerSource
from april.registry import look_in
from april.rollouts.batch import RolloutBatch, to_tensors
from april.rollouts.local import LocalRun
from april.rollouts.prompts import Piece, Prompt, PromptsWanted, PromptText, encoder, messages
from april.rollouts.weights import Score, Weights, canary_by, canary_of, collect
from april.security.keys import load_keys
from april.weights import TRANSPORTS
from april.weights.publisher import WeightPublisher, weights_towards
from april.wire.training import Discard, Submission

LOCAL = "local"


class TrainerSource(Source, Protocol):
    def submit(self, first: int, prompts: list[Submission], ids: np.ndarray) -> int:
        """Bring prompts, numbered from `first` on, int32 ids one behind the other; how many were brought by now."""


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
        source: TrainerSource | None,
        publisher: Publisher | None,
        group: dist.ProcessGroup | None = None,
    ):
        """`source` and `publisher` are rank 0's, None elsewhere; `group`: over all ranks."""
        self.config = config
        self.submitted = 0
        """prompts that were brought so far, where the trainer brings them"""
        self.step = checkpoint
        """of the weights that the trainer holds: the number of batches in them"""
        self.over = False
        """whether all batches have been handed out"""
        self._source, self._group = source, group
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
        self._taken: RolloutBatch | None = None
        self._encode = encoder(config)
        self._brings = TRANSPORTS.find(config.weights.transport).brings
        if config.data.source == "submitted":
            self.submitted = self._bring([])

    def _to_tensors(self, batch: Batch) -> RolloutBatch:
        return to_tensors(batch, self.config.algorithm.advantage)

    def batches(self) -> Iterator[RolloutBatch]:
        """Each batch once, relative to `durable`, until the run is over. Collective.

        Asking for the next says `consumed` of the last where that was not said. RuntimeError where its weights were
        not published, for which the workers would wait for ever.
        """
        while (batch := self.take()) is not None:
            yield batch

    def take(self) -> RolloutBatch | None:
        """The next batch, as `batches` gives it; None once the run is over. Collective.

        PromptsWanted where the trainer brings the prompts and has brought too few: submit more, and take again.
        """
        if self._taken and self._consumed < self.step:
            self.consumed(self._taken)
        self._require_published()
        self._handover.ask(self.step)
        arrived = self._handover.take()
        if arrived is None:
            self.over = True
            return None
        (_, batch), self._wait_s = arrived
        if not batch.groups:
            raise PromptsWanted(
                f"all {self.submitted} prompts that were submitted have been generated for, and fewer than "
                f"{self.config.schedule.rollout_batch_size} groups are complete; submit more with run.submit"
            )
        self._taken, self.step = batch, batch.checkpoint
        return batch

    def submit(self, prompts: Iterable[Prompt | PromptText], first: int | None = None) -> int:
        """Bring prompts, where `data.source` is "submitted"; how many were brought by now. Collective.

        When it returns they are in the journal. `first`: the number of the first of them in the trainer's own count,
        from 0; those that were brought before are passed over, so that a trainer that goes on from a checkpoint may say
        the same again. None: behind the last. Raises ValueError for a prompt that cannot be used.
        """
        pieces = [self._encode(one if isinstance(one, Prompt) else Prompt(one)) for one in prompts]
        first = self.submitted if first is None else first
        if first > self.submitted:
            raise ValueError(
                f"prompt {first} does not follow the {self.submitted} that were brought; bring those between"
            )
        for some in messages(pieces[self.submitted - first :]):
            self.submitted = self._bring(some)
        return self.submitted

    def _bring(self, pieces: Sequence[Piece]) -> int:
        """Collective."""
        brought = 0
        if self._source:
            ids = np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in pieces)])
            brought = self._source.submit(self.submitted, [submission for submission, _ in pieces], ids)
        return share_numbers((brought,), self._group)[0] if self._group is not None else brought

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
        if not self._brings:
            raise RuntimeError(
                f"weights.transport = {self.config.weights.transport!r} leaves it to your framework to load weights; "
                "call run.updating or run.version"
            )
        figures = self._sending.finish()
        if self._sending.is_due(self.step):
            canary = canary_of(weights, self.config)
            self._sending.start(self.step, collect(weights, keep=self._source is not None), canary)
        self._published = self.step
        return figures

    @contextmanager
    def updating(self, score: Score | None = None) -> Iterator[bool]:
        """Where `weights.transport` is "external": the weights `step` are loaded into the servers in this block, by
        whatever loads them. Nothing is generated in it, and all that comes later has their name. Collective.

        Gives whether they are wanted: while batches come again the servers hold newer ones, and are to keep them.
        `score` says what the trainer's weights make of the canary; without it nothing is proven. Raises RuntimeError
        for a worker that does not stop within `weights.publish_deadline_s`.
        """
        due = self._sending.is_due(self.step)
        if due:
            canary = canary_by(score, self.config) if score and self.config.weights.canary else None
            self._sending.announce(self.step, canary)
            self._meet()
        yield due
        if due:
            self._meet()
            self._sending.brought()
        self._published = self.step

    def version(self, step: int, score: Score | None = None) -> None:
        """The servers hold weights `step` already, and have generated nothing since; otherwise as `updating`."""
        if step != self.step:
            raise ValueError(f"version {step} was said of weights that hold {self.step} batches; say run.step")
        with self.updating(score):
            pass

    def _meet(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def durable(self, batch: RolloutBatch | int, oldest: int | None = None) -> None:
        """A checkpoint that contains `batch`, or that is of this step, is on disk; `oldest`: the step of the oldest one
        that is kept, by default this one's. Batches below that are never handed out again."""
        step = batch if isinstance(batch, int) else batch.checkpoint
        if self._source:
            self._source.durable(step, step if oldest is None else oldest)

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
    loaded = configuration.load(paths, words, inputs=["model"])
    look_in(*loaded.run.parts)
    check_needs_no_critic(loaded)
    group = handover_group() if dist.is_available() and dist.is_initialized() else None
    if group is not None and dist.get_rank() > 0:
        return Connection(loaded, checkpoint, None, None, group)
    local = LocalRun(loaded, paths, words) if run == LOCAL else None
    try:
        address = local.address() if local else address_at(configuration.check_address(run), loaded.broker.patience_s)
        keys = loaded.security.keys
        device = "cuda" if torch.cuda.is_available() else "cpu"
        publisher = WeightPublisher(weights_towards(loaded, address), loaded.run.name, device, keys)
        source = WatchfulSource(address, publisher.address, loaded.broker.patience_s, load_keys(keys, "learner"))
        source.local = local
        return Connection(loaded, checkpoint, source, publisher, group)
    except BaseException:
        leave(local, finished=False)
        raise


def as_word(value: Any) -> str:
    """As on the command line: TOML."""
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def check_needs_no_critic(config: Config) -> None:
    """Raises ConfigError for advantages that April's learner alone can compute."""
    if needs_values(config.algorithm, imported=True):
        raise ConfigError(
            f"key 'algorithm.advantage' = {config.algorithm.advantage!r} asks for a critic, and a trainer of yours has "
            "its own, if any; leave it out, and take the rewards of a batch"
        )
    if needs_norms(config.algorithm, imported=True):
        raise ConfigError(
            f"key 'algorithm.advantage' = {config.algorithm.advantage!r} asks for the gradient of each response, which "
            "April's learner alone has; leave it out, and take the rewards of a batch"
        )
