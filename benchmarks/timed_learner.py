"""The learner's own loop for so many batches, each of them timed: with training, or with a wait in its place."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from april.config import Config
from april.learner import loop
from april.learner.batch import TrainingBatch
from april.learner.trainer import ReadyBatch, Trainer
from april.simulate.scenario import LearnerCost


class Enough(Exception):
    """The measurement is over."""


@dataclass(frozen=True)
class Trained:
    at: float
    """monotonic time of its end (seconds)"""
    tokens: int
    """in the batch's responses"""
    seconds: float
    """that training it took"""


class Counted:
    """What the trainers of `consume` share: a warm-up and `steps` batches more, then `Enough`."""

    def __init__(self, warmup_steps: int, steps: int):
        self.warmup_steps, self.steps = warmup_steps, steps
        self.trained: list[Trained] = []

    def note(self, began: float, batch: TrainingBatch) -> None:
        now, tokens = time.monotonic(), sum(sample.response_tokens for sample in batch.samples)
        self.trained.append(Trained(now, tokens, now - began))

    def saved(self, wait: bool = False) -> None:
        """Nothing has been saved; a good moment to end, since the batch has been reported."""
        if len(self.trained) == self.warmup_steps + self.steps:
            raise Enough

    @property
    def measured(self) -> list[Trained]:
        """The batches behind the warm-up."""
        return self.trained[self.warmup_steps :]

    @property
    def began(self) -> float:
        """When the warm-up's last batch was trained."""
        return self.trained[self.warmup_steps - 1].at


class TimedTrainer(Counted, Trainer):
    """Waits in place of training, for as long as a scenario's learner; the weights that it publishes are real."""

    def __init__(self, config: Config, cost: LearnerCost, warmup_steps: int, steps: int):
        Counted.__init__(self, warmup_steps, steps)
        Trainer.__init__(self, config, torch.device("cpu"))
        self.cost = cost

    def prepare(self, batch: TrainingBatch) -> None:
        """There is nothing to make ready."""

    def step(self, batch: TrainingBatch, ready: None) -> dict[str, float]:
        began, tokens = time.monotonic(), sum(sample.response_tokens for sample in batch.samples)
        time.sleep(self.cost.step_s + self.cost.token_s * tokens)
        self.note(began, batch)
        self.step_count += 1
        return {"loss": 0.0, "nonfinite": 0.0, "tokens": float(tokens)}


class RealTrainer(Counted, Trainer):
    """Trains, on this process' cores."""

    def __init__(self, config: Config, warmup_steps: int, steps: int):
        Counted.__init__(self, warmup_steps, steps)
        Trainer.__init__(self, config, torch.device("cpu"))
        self.batches: list[TrainingBatch] = []

    def step(self, batch: TrainingBatch, ready: ReadyBatch | None = None) -> dict[str, float]:
        began = time.monotonic()
        metrics = super().step(batch, ready)
        self.note(began, batch)
        self.batches.append(batch)
        return metrics

    @property
    def token_s(self) -> float:
        """Seconds of training for a token of the measured batches."""
        return sum(one.seconds for one in self.measured) / sum(one.tokens for one in self.measured)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Train the measured batches again and again meanwhile, as often as in the run."""
        period_s, ended = (self.trained[-1].at - self.began) / self.steps, threading.Event()

        def work() -> None:
            for batch in itertools.cycle(self.batches[self.warmup_steps :]):
                began = time.monotonic()
                Trainer.step(self, batch)
                if ended.wait(max(0.0, began + period_s - time.monotonic())):
                    break

        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(work)
            try:
                yield
            finally:
                ended.set()
            working.result()


def consume(config: Config, trainer: Counted, source: loop.BatchSource, publisher: loop.Publisher) -> None:
    """Take batches until the trainer has enough. The default process group, of one rank, is there."""
    try:
        loop.run(config, trainer, source, publisher)
    except Enough:
        return
    raise RuntimeError(f"the run ended after {trainer.step_count} batches, before there was enough to measure")
