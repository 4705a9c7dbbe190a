"""The learner's own loop with the training of a batch replaced by a wait; the weights that it publishes are real."""

import time
from collections.abc import Mapping

import torch

from april.config import Config
from april.learner import loop
from april.learner.batch import Batch
from april.simulate.scenario import LearnerCost


class Enough(Exception):
    """The measurement is over."""


class TimedTrainer:
    """Stands in for `april.learner.trainer.Trainer` in `loop.run`, for a warm-up and `steps` batches more."""

    oldest_checkpoint = 0

    def __init__(self, cost: LearnerCost, tensors: Mapping[str, torch.Tensor], warmup_steps: int, steps: int):
        self.cost, self.tensors = cost, tensors
        self.warmup_steps, self.steps = warmup_steps, steps
        self.step_count = 0
        self.trained: list[tuple[float, int]] = []
        """(monotonic time, response tokens) of each batch"""

    def restore(self) -> int:
        return 0

    def prepare(self, batch: Batch) -> None:
        """There is nothing to make ready."""

    def step(self, batch: Batch, ready: None) -> dict[str, float]:
        tokens = sum(sample.response_tokens for sample in batch.samples)
        time.sleep(self.cost.step_s + self.cost.token_s * tokens)
        self.trained.append((time.monotonic(), tokens))
        self.step_count += 1
        return {"loss": 0.0, "nonfinite": 0.0}

    @property
    def measured(self) -> list[tuple[float, int]]:
        """The batches behind the warm-up."""
        return self.trained[self.warmup_steps :]

    @property
    def began(self) -> float:
        """When the warm-up's last batch was trained."""
        return self.trained[self.warmup_steps - 1][0]

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def start_save(self) -> None:
        """There is nothing to save."""

    def saved(self, wait: bool = False) -> None:
        """Nothing has been saved; a good moment to end, since the batch has been reported."""
        if self.step_count == self.warmup_steps + self.steps:
            raise Enough

    def export(self) -> None: ...


def consume(config: Config, trainer: TimedTrainer, source: loop.Source, publisher: loop.Publisher) -> None:
    """Take batches until the trainer has enough. The default process group, of one rank, is there."""
    try:
        loop.run(config, trainer, source, publisher)
    except Enough:
        return
    raise RuntimeError(f"the run ended after {trainer.step_count} batches, before there was enough to measure")
