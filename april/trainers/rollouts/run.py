"""An external trainer's connection to a run: take batches in order, report them, and publish weights to the workers.

    connect -> publish -> batch 0 -> consumed(0), publish -> batch 1 -> ... -> close

Under torchrun every rank makes the same calls in the same order; only rank 0 talks to the broker and the workers.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import orjson
import torch
import torch.distributed as dist

from april import config as configuration
from april.config import Config
from april.config.advantages import needs_norms, needs_parts, needs_values
from april.config.hub import Fetcher
from april.learner.batch import TrainingBatch
from april.learner.loop import broadcast_integers
from april.learner.prefetch import BatchPrefetcher, BatchSource, Publisher, WeightSender
from april.learner.process_group import long_wait_group
from april.learner.samples import SampleWriter
from april.learner.source import BrokerSource
from april.learner.token_stats import keeps_samples
from april.trainers.rollouts.batch import RolloutBatch, gradient_counts, to_tensors
from april.trainers.rollouts.local import LocalRun
from april.trainers.rollouts.prompts import (
    EncodedPrompt,
    Prompt,
    PromptEncoder,
    PromptsWanted,
    PromptText,
    split_into_messages,
)
from april.trainers.rollouts.weights import Score, Weights, canary_from_model, canary_from_score, collect
from april.util.errors import refuse
from april.util.registry import add_import_folders
from april.weights import TRANSPORTS
from april.weights.publisher import WeightPublisher
from april.weights.transports import weights_towards
from april.wire.security.keys import load_keys
from april.wire.sockets.base import address_at
from april.wire.training import Discard, Submission

LOCAL = "local"
"""Value of the argument `run` of `connect` that starts broker and workers on this machine."""


class TrainerSource(BatchSource, Protocol):
    """A batch source to which an external trainer can also submit prompts."""

    def submit(self, first: int, prompts: list[Submission], ids: np.ndarray, images: Mapping[str, bytes]) -> int:
        """Submit prompts numbered from `first` on, with their token ids concatenated, int32, and the files of their
        images by name; returns the number of prompts submitted so far."""


class MonitoredSource(BrokerSource):
    """A broker source that checks, while it waits, that the local run's processes have not failed."""

    local: LocalRun | None = None

    def alive(self) -> None:
        super().alive()
        if self.local:
            self.local.check()


class Rollouts:
    """A trainer's view of a run, returned by `connect`. Use it in a `with` block, in one thread."""

    def __init__(
        self,
        config: Config,
        checkpoint: int,
        source: TrainerSource | None,
        publisher: Publisher | None,
        group: dist.ProcessGroup | None = None,
    ):
        """`checkpoint`: policy step of the trainer's weights; `source`, `publisher`: on rank 0, None on other ranks;
        `group`: process group of all ranks."""
        self.config = config
        self.submitted = 0
        """Number of prompts that the trainer has submitted so far to a run whose `data.source` is "submitted";
        otherwise 0."""
        self.step = checkpoint
        """Policy step of the trainer's weights: the number of batches they were trained on."""
        self.finished = False
        """Whether all batches of the run have been handed out to the trainer."""
        self._source, self._group = source, group
        incarnation, frontier = source.start(checkpoint) if source else (0, 0)
        if group is not None:
            incarnation, frontier = broadcast_integers((incarnation, frontier), group)
        self.frontier = frontier
        """Largest number of batches that any trainer of the run had consumed when this one started. Batches before it
        are delivered again unchanged, and weights of steps below it are not sent to the workers."""
        self._prefetcher = BatchPrefetcher(source, group, self._to_tensors)
        self._sender = WeightSender(publisher, incarnation, frontier)
        self._published = -1
        self._consumed = checkpoint
        self._wait_s = self._taken_at = 0.0
        self._last_batch: RolloutBatch | None = None
        self._received: TrainingBatch | None = None
        """The last batch in the form in which it was received, with the further groups (discarded and held-out ones)
        that the broker sent with it for the sample logs."""
        self._samples = SampleWriter(config) if source and config.samples.every and config.run_dir.is_dir() else None
        self._encoder = PromptEncoder(config, keeps_files=source is not None)
        self._carries_weights = TRANSPORTS.find(config.weights.transport).carries_weights
        if config.data.source == "submitted":
            self.submitted = self._submit([])

    def _to_tensors(self, batch: TrainingBatch) -> RolloutBatch:
        return to_tensors(batch, self.config.algorithm)

    def batches(self) -> Iterator[RolloutBatch]:
        """Yield the batches until the run is over; after a restart, from the last durable checkpoint on. Collective.

        Asking for the next batch reports the last one as consumed, unless that was done. Raises RuntimeError if the
        weights of the last batch were not published, because the workers would wait for them forever.
        """
        while (batch := self.take()) is not None:
            yield batch

    def take(self) -> RolloutBatch | None:
        """The next batch, as in `batches`; None once the run is over. Collective.

        Raises PromptsWanted if the trainer has submitted too few prompts: submit more, and take again.
        """
        if self._last_batch and self._consumed < self.step:
            self.consumed(self._last_batch)
        self._require_published()
        self._prefetcher.request(self.step)
        arrived = self._prefetcher.take()
        if arrived is None:
            self.finished = True
            if self._samples and self._source:
                self._samples.keep_untrained(self.step, self._source.leftover)
            return None
        (self._received, batch), self._wait_s = arrived
        self._taken_at = time.perf_counter()
        if not batch.groups:
            raise PromptsWanted(
                f"all {self.submitted} prompts that were submitted have been generated for, and fewer than "
                f"{self.config.schedule.rollout_batch_size} groups are complete; submit more with run.submit"
            )
        self._last_batch, self.step = batch, batch.checkpoint
        return batch

    def submit(self, prompts: Iterable[Prompt | PromptText], first: int | None = None) -> int:
        """Submit prompts, where `data.source` is "submitted"; returns the number submitted so far. Collective.

        When it returns, the prompts are journaled. `first`: number of the first one in the trainer's own count, from 0;
        prompts submitted before are skipped, so that a trainer resumed from a checkpoint can submit the same again.
        None: after the last one. Raises ValueError for a prompt that cannot be used, and ConfigError for images that
        the run does not take.
        """
        given = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
        first = self.submitted if first is None else first
        if first > self.submitted:
            raise ValueError(
                f"prompt {first} does not follow the {self.submitted} that were submitted; submit those between"
            )
        for part in split_into_messages(self._encoder.encode(given[self.submitted - first :])):
            self.submitted = self._submit(part)
        return self.submitted

    def _submit(self, encoded: Sequence[EncodedPrompt]) -> int:
        """Submit encoded prompts; returns the number submitted so far. Collective."""
        submitted = 0
        if self._source:
            ids = np.concatenate([np.zeros(0, np.int32), *(prompt.ids for prompt in encoded)])
            images = dict(item for prompt in encoded for item in prompt.images.items())
            submissions = [prompt.submission for prompt in encoded]
            submitted = self._source.submit(self.submitted, submissions, ids, images)
        return broadcast_integers((submitted,), self._group)[0] if self._group is not None else submitted

    def _require_published(self) -> None:
        if self._sender.is_due(self.step) and self._published < self.step:
            raise RuntimeError(
                f"weights {self.step} have not been published, and the workers wait for them; call run.publish(model) "
                "before the first batch and after each"
            )

    def consumed(
        self, batch: RolloutBatch, metrics: Mapping[str, float] | None = None, discarded: Discard = ""
    ) -> None:
        """Report that the weights contain `batch`, or that it was `discarded` (the reason) and left them unchanged.

        `metrics` are shown as those of April's learner are, `loss`, `entropy`, `grad_norm` and `lr` in its charts.
        Samples of the batch are stored if the run folder exists on this machine.
        """
        self._consumed = batch.checkpoint
        if self._source:
            known = {"wait_s": self._wait_s, "train_s": time.perf_counter() - self._taken_at} | gradient_counts(batch)
            self._source.consumed(batch.step, known | dict(metrics or {}), discarded)
        if self._samples and self._received and self._received.step == batch.step:
            if keeps_samples(self.config.samples, batch.step):
                advantages = batch.advantages.numpy(force=True)
                self._samples.keep(self._received, advantages, None, nonfinite=discarded == "nonfinite")
            else:
                self._samples.keep_untrained(batch.step, self._received.untrained)

    def publish(self, weights: Weights) -> dict[str, float]:
        """Start sending the current weights to the workers, after the previous ones have arrived; returns figures about
        the previous transfer. Collective.

        `weights`: a module, a state dictionary, or (name, tensor) pairs named as in the Hugging Face folder; sharded
        tensors are gathered. Weights of batches that are trained again after a restart are not sent.
        """
        if not self._carries_weights:
            raise RuntimeError(
                f"weights.transport = {self.config.weights.transport!r} leaves it to your framework to load weights; "
                "call run.updating or run.version"
            )
        figures = self._sender.finish()
        if self._sender.is_due(self.step):
            canary = canary_from_model(weights, self.config)
            self._sender.start(self.step, collect(weights, keep=self._source is not None), canary)
        self._published = self.step
        return figures

    @contextmanager
    def updating(self, score: Score | None = None) -> Iterator[bool]:
        """With `weights.transport` = "external": inside this block the trainer loads the weights of its current step
        into the inference servers. Meanwhile nothing is generated; tokens sampled after the block carry the new
        version. Collective.

        Yields whether the servers need these weights. They do not while batches are repeated after a restart: then the
        servers hold newer weights and must keep them. `score`: the trainer's log-probabilities of the canary; without
        it the loaded weights are not verified. Raises RuntimeError for a worker that does not stop within
        `weights.publish_deadline_s`.
        """
        due = self._sender.is_due(self.step)
        if due:
            canary = canary_from_score(score, self.config) if score and self.config.weights.canary else None
            self._sender.announce(self.step, canary)
            self._barrier()
        yield due
        if due:
            self._barrier()
            self._sender.externally_loaded()
        self._published = self.step

    def version(self, step: int, score: Score | None = None) -> None:
        """Tell the workers that their servers hold weights `step`; equivalent to an empty `updating` block, for servers
        that have loaded these weights and generated nothing since. `score`: the trainer's log-probabilities of the
        canary; None: the loaded weights are not verified."""
        if step != self.step:
            raise ValueError(f"version {step} was said of weights that hold {self.step} batches; say run.step")
        with self.updating(score):
            pass

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def durable(self, batch: RolloutBatch | int, oldest: int | None = None) -> None:
        """Report that a checkpoint after `batch`, or of that policy step, is on disk. `oldest`: step of the oldest kept
        checkpoint, by default this one. Batches below `oldest` are never handed out again."""
        step = batch if isinstance(batch, int) else batch.checkpoint
        if self._source:
            self._source.durable(step, step if oldest is None else oldest)

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._samples:
            self._samples.finish()
        if kind is None:
            self._sender.finish()


class ConnectedRollouts(Rollouts):
    """Rollouts that own their broker connection and local run: both end with the `with` block."""

    def __init__(
        self,
        config: Config,
        checkpoint: int,
        source: MonitoredSource | None,
        publisher: WeightPublisher | None,
        group: dist.ProcessGroup | None,
    ):
        self._broker, self._publisher = source, publisher
        super().__init__(config, checkpoint, source, publisher, group)

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._broker and self._publisher:
                self._broker.close()
                self._publisher.close()
                end_local_run(self._broker.local, finished=self.finished and kind is None)


def end_local_run(local: LocalRun | None, finished: bool) -> None:
    if local and finished:
        local.wait()
    elif local:
        local.stop()


def check_has_channels(config: Config) -> None:
    """Refuse snapshots of weights, which only April's learner writes. Raises ConfigError."""
    if TRANSPORTS.find(config.weights.transport).pulls:
        refuse(
            "weights.transport",
            config.weights.transport,
            "has workers read snapshots, which only April's learner writes",
            f"set {TRANSPORTS.names_where(lambda transport: not transport.pulls)}",
        )


def connect(
    config: str | Path | Sequence[Path],
    checkpoint: int = 0,
    run: str = LOCAL,
    overrides: Mapping[str, Any] | None = None,
) -> Rollouts:
    """Connect a trainer to the run of a TOML file, in place of April's learner.

    `checkpoint`: policy step of the trainer's weights, 0 for those of `model.path`; that of a saved checkpoint is
    `batch.checkpoint`. `run`: "local" starts broker and workers here and resumes an existing run folder;
    tcp://HOST:PORT, or a run folder, connects to a running broker. `overrides`: configuration keys, such as
    {"schedule.max_steps": 8}.

    Under torchrun every rank calls it, after the default process group exists. Raises ConfigError, BrokerUnreachable,
    BrokerRefused (if batches after the checkpoint are no longer kept), and LocalRunFailed.
    """
    paths = [Path(config)] if isinstance(config, str | Path) else [Path(path) for path in config]
    flags = [flag for key, value in (overrides or {}).items() for flag in (f"--{key}", toml_text(value))]
    loaded = configuration.load(paths, flags, inputs=["model"], fetch=Fetcher("tokenizer"))
    flags += loaded.pins
    add_import_folders(*loaded.run.parts)
    check_needs_no_critic(loaded)
    check_has_channels(loaded)
    group = long_wait_group() if dist.is_available() and dist.is_initialized() else None
    if group is not None and dist.get_rank() > 0:
        return ConnectedRollouts(loaded, checkpoint, None, None, group)
    local = LocalRun(loaded, paths, flags) if run == LOCAL else None
    try:
        address = local.address() if local else address_at(configuration.check_address(run), loaded.broker.patience_s)
        loaded = configuration.with_run_keys(loaded, address if local else run)
        keys = loaded.keys
        device = "cuda" if torch.cuda.is_available() else "cpu"
        publisher = WeightPublisher(weights_towards(loaded, address), loaded.run.name, device, keys, address)
        stored = loaded.samples.every and loaded.run_dir.is_dir()
        keeps = partial(keeps_samples, loaded.samples) if stored else None
        source = MonitoredSource(
            address, publisher.address, loaded.broker.patience_s, load_keys(keys, "learner"), keeps
        )
        source.local = local
        return ConnectedRollouts(loaded, checkpoint, source, publisher, group)
    except BaseException:
        end_local_run(local, finished=False)
        raise


def toml_text(value: Any) -> str:
    """A configuration value as TOML text, as it is written on the command line."""
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def check_needs_no_critic(config: Config) -> None:
    """Raises ConfigError if the configuration asks for what only April's learner can compute: some estimators of
    advantages (such as those with a critic), a divergence between policies, algorithms per source, or training on
    conversations."""
    for number, source in enumerate(config.data.sources):
        if source.algorithm:
            why = "is for April's learner, and a trainer of yours has its own algorithm"
            refuse(f"data.sources.{number}.algorithm", source.algorithm, why, "leave it out")
    if conversations := config.data.sft_sources:
        why = "is trained by April's learner, and a trainer of yours trains conversations itself"
        refuse(f"data.sources.{min(conversations)}.kind", "sft", why, "leave the source out")
    if divergence := config.algorithm.divergence:
        why = "is a loss of April's learner, and a trainer of yours has its own, if any"
        refuse("algorithm.divergence", divergence, why, "leave it out")
    for needs, why in (
        (needs_values, "asks for a critic, and a trainer of yours has its own, if any"),
        (needs_norms, "asks for the gradient of each response, which April's learner alone has"),
        (needs_parts, "is made of the parts of the reward, which April's learner alone weighs"),
    ):
        if needs(config.algorithm, imported=True):
            fix = "leave it out, and take the rewards of a batch"
            refuse("algorithm.advantage", config.algorithm.advantage, why, fix)
