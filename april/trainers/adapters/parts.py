"""Common to the adapters: a run in the hands of another framework's trainer, its options, groups and checkpoints."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from april.config import Config, ConfigError
from april.config.checks import first_cut_key
from april.learner.batch import TrainSample
from april.trainers import rollouts
from april.trainers.rollouts import PromptsWanted, RolloutBatch, Rollouts
from april.util.errors import refuse
from april.util.files import sync


class TrainerRun:
    """Base class of the adapters: an April run that another framework's trainer uses, with the batch that it trains on,
    its weights and its checkpoints."""

    def __init__(self, run: Rollouts):
        self.run = run
        self.batch: RolloutBatch | None = None
        """The batch that is being trained on; None if there is none."""
        self.metrics: dict[str, float] = {}
        """Metrics that the trainer has reported so far for the current batch."""
        self._consumed = self._durable = run.step
        """`_consumed`: policy step of the newest weights that were reported to the run; `_durable`: that of the newest
        checkpoint."""

    def take(self, limit: str) -> RolloutBatch:
        """The run's next batch. Raises RuntimeError if the run has no further batch although the trainer asks for one;
        the error says to lower `limit`, the trainer's option that bounds its number of steps."""
        self.batch, self.metrics = self.run.take(), {}
        if self.batch is None:
            raise RuntimeError(f"the run is over after {self.run.step} batches; lower {limit} to that")
        return self.batch

    def take_submitted(self, submit_prompts: Callable[[], None], limit: str) -> RolloutBatch:
        """The run's next batch, where the trainer submits the prompts. `submit_prompts` submits some more of them. It
        is called until there are enough for the groups that are generated at a time (at least one batch), and again
        whenever discarded groups leave too few for the batch. `limit` and errors: as for `take`."""
        schedule = self.run.config.schedule
        ahead = max(schedule.groups_per_round, schedule.rollout_batch_size)
        while self.run.submitted < self.run.step * schedule.rollout_batch_size + ahead:
            submit_prompts()
        while True:
            try:
                return self.take(limit)
            except PromptsWanted:
                submit_prompts()

    def report_consumed(self) -> None:
        """Report that the trainer's weights contain the current batch, with its metrics. Does nothing if that was
        reported before."""
        if self.batch and self._consumed < self.batch.checkpoint:
            self.run.consumed(self.batch, figures(self.batch) | self.metrics)
            self._consumed = self.batch.checkpoint

    def report_checkpoint(self, step: int, folder: Path, oldest: int | None = None) -> None:
        """Sync the checkpoint of policy step `step` in `folder` to disk, and report it as durable. Does nothing if that
        was done before. `oldest`: step of the oldest checkpoint that the trainer keeps, by default this one."""
        if self._durable < step <= self.run.step:
            sync_folder(folder)
            self.run.durable(step, oldest)
            self._durable = step

    @property
    def is_trained(self) -> bool:
        """Whether all steps of the run are trained."""
        return self.run.step >= self.run.config.schedule.max_steps

    def close(self) -> None:
        """Close the connection. If all steps are trained, the run ends after an evaluation of the last weights."""
        if self.is_trained:
            self.run.take()
        self.run.__exit__(None, None, None)


def connect_checked(
    config: Any,
    checkpoint: int,
    run: str,
    check: Callable[[Config], None],
    overrides: Mapping[str, Any] | None = None,
) -> Rollouts:
    """`april.connect(config, checkpoint, run, overrides)`, then `check` of the run's configuration. If `check` raises
    ConfigError, the connection is closed again, and the error passed on."""
    connected = rollouts.connect(config, checkpoint, run, overrides)
    try:
        check(connected.config)
    except ConfigError as error:
        connected.__exit__(ConfigError, error, None)
        raise
    return connected


# --- options ----------------------------------------------------------------------------------------------------------


def check_options(config: Config, framework: str, options: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ConfigError if an option of a framework does not fit the run. Also if the run truncates the sampling
    distribution (top-k, top-p, min-p), which the framework's log-probabilities would not reflect. `options`: (value,
    values that fit) by name."""
    for name, (value, *fitting) in options.items():
        if value not in fitting:
            fix = "leave it out" if fitting[0] in (None, False) else f"set it to {' or '.join(map(repr, fitting))}"
            raise ConfigError(f"{framework}'s {name!r} = {value!r} does not fit the run; {fix}")
    if config.sampling.is_cut:
        key, cut = first_cut_key(config)
        refuse(f"sampling.{key}", cut, f"cuts the distribution, which {framework} does not follow", "leave it out")


def check_own_prompts(config: Config, framework: str) -> None:
    """Raises ConfigError if the framework submits the prompts and the run may discard some of their groups: such a
    framework expects all prompts that it submits in its next batch."""
    schedule = config.schedule
    trains_all = schedule.groups_per_round == schedule.rollout_batch_size and not schedule.filters_groups
    if config.data.source == "submitted" and not trains_all:
        refuse(
            "data.source",
            "submitted",
            f"trains the prompts of each of {framework}'s batches and no others",
            "leave out schedule.over_sampling_batch_size and filters, or let April draw the prompts: data.path",
        )


# --- batches ----------------------------------------------------------------------------------------------------------


def figures(batch: RolloutBatch) -> dict[str, float]:
    """Metrics of a batch that every adapter reports."""
    return {"reward": batch.rewards.mean().item()}


def fill_group(group: list[Any], size: int) -> list[Any]:
    """A group of `size` samples for trainers that need groups of equal size. If samples of `group` were lost, others of
    it are repeated in their place."""
    return list(itertools.islice(itertools.cycle(group), size))


def full_groups(batch: RolloutBatch, size: int) -> list[list[TrainSample]]:
    """The batch's groups, each filled up to `size` samples by `fill_group`. If the trainer submits the prompts, the
    groups are in the order of submission."""
    numbers = np.argsort(batch.prompts) if batch.prompts else range(len(batch.groups))
    return [fill_group(batch.groups[number], size) for number in numbers]


def sampled_mask(sample: TrainSample) -> np.ndarray:
    """1 at the response's tokens that the policy sampled, 0 at observations; int64 [T]."""
    mask = np.zeros(sample.response_tokens, np.int64)
    mask[sample.sampled_positions] = 1
    return mask


# --- files ------------------------------------------------------------------------------------------------------------


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a Hugging Face folder."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from tensors_of(path)


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a safetensors file."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def step_folders(parent: Path, prefix: str) -> dict[int, Path]:
    """The folders named `prefix` and a number, by that number, such as a trainer's checkpoints by their step."""
    return {int(folder.name.removeprefix(prefix)): folder for folder in sorted(parent.glob(f"{prefix}[0-9]*"))}


def latest_step(file: Path, prefix: str = "") -> int | None:
    """Step of a trainer's newest checkpoint, as `file` names it: a number, with `prefix` before it. None without the
    file."""
    return int(file.read_text().strip().removeprefix(prefix)) if file.is_file() else None


def sync_folder(folder: Path) -> None:
    """Sync a checkpoint's files and folders to disk, which trainers do not do when they write it."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)
