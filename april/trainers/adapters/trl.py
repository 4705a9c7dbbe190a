"""TRL's GRPOTrainer on April's rollouts.

    arguments = GRPOConfig(...)
    with april.trainers.adapters.trl.connect("my-run.toml", arguments) as rollouts:
        trainer = GRPOTrainer(
            model=...,
            args=arguments,
            train_dataset=rollouts.dataset,
            reward_funcs=rollouts.reward,
            rollout_func=rollouts.generate,
        )
        rollouts.train(trainer)

April draws the prompts, generates, and scores. TRL computes advantages, corrects for stale tokens by the behaviour
log-probabilities, trains and saves. One batch is one optimizer step. TRL's checkpoints make their batches durable, and
`train` resumes from the newest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from april.config import Config
from april.learner.batch import TrainSample
from april.trainers import rollouts
from april.trainers.adapters.parts import (
    TrainerRun,
    check_options,
    connect_checked,
    full_groups,
    sampled_mask,
    step_folders,
)
from april.trainers.rollouts import Rollouts

REWARD_COLUMN = "april_reward"
"""Column in which TRL passes each sample's reward to `TrlRollouts.reward`."""
CHECKPOINT_PREFIX = "checkpoint-"
Scores: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
Score: TypeAlias = Callable[..., Scores]
"""TRL's scoring function, which returns log-probabilities [B, C], entropies [B, C] and an auxiliary loss."""


class TrlRollouts(TrainerRun):
    """Dataset, reward and rollout functions for GRPOTrainer, backed by a run."""

    def __init__(self, run: Rollouts, arguments: GRPOConfig, resumed_from: str | None = None):
        """`resumed_from`: folder of TRL's checkpoint from which the trainer resumes; None: it begins anew."""
        super().__init__(run)
        self.arguments, self.resumed_from = arguments, resumed_from

    @property
    def dataset(self) -> Dataset:
        """Dataset of empty rows that only determine TRL's number of steps; the prompts come from the run."""
        schedule = self.run.config.schedule
        return Dataset.from_dict({"prompt": [""] * schedule.rollout_batch_size * schedule.max_steps})

    def reward(self, **columns: Any) -> list[float]:
        """Reward function for TRL: returns the rewards that April's verifier has already computed."""
        return columns[REWARD_COLUMN]

    def generate(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Implementation of TRL's `rollout_func`: returns this rank's share of the next batch. Collective.

        Of the `prompts`, which are TRL's own, only their number counts. Raises RuntimeError if the run is over before
        TRL is, and if TRL evaluates, which April does itself.
        """
        if not trainer.model.training:
            raise RuntimeError(
                "TRL cannot evaluate on April's rollouts; set eval_strategy='no', evaluation.every is April's"
            )
        groups = full_groups(self.take("max_steps"), self.run.config.schedule.n_samples_per_prompt)
        samples = [sample for group in groups for sample in group]
        first = (dist.get_rank() if dist.is_initialized() else 0) * len(prompts)
        return to_trl(samples[first : first + len(prompts)])

    def attach(self, trainer: GRPOTrainer) -> None:
        """Connect a trainer to the run: rollouts, weights and progress. `train` calls it.

        TRL corrects by behaviour log-probabilities only for rollouts of a generation server, to which it sends weights
        before it generates. This makes April that server.
        """
        trainer.use_vllm = True
        trainer.vllm_generation = WeightsToApril(self, trainer)
        trainer._last_loaded_step = -1
        trainer._get_per_token_logps_and_entropies = partial(
            score_by_length, trainer._get_per_token_logps_and_entropies
        )
        trainer._prepare_inputs = partial(group_by_length, trainer, trainer._prepare_inputs)
        trainer.add_callback(ProgressCallback(self, trainer))

    def train(self, trainer: GRPOTrainer) -> Any:
        """Run `trainer.train` from the newest checkpoint in `output_dir`, if there is one."""
        self.attach(trainer)
        return trainer.train(resume_from_checkpoint=self.resumed_from)

    def __enter__(self) -> "TrlRollouts":
        self.run.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self.run.__exit__(kind, error, trace)


class WeightsToApril:
    """Replaces TRL's client of its generation server: sends the weights to April's workers instead."""

    def __init__(self, owner: TrlRollouts, trainer: GRPOTrainer):
        self.owner, self.trainer = owner, trainer

    def sync_weights(self) -> None:
        self.owner.report_consumed()
        self.owner.run.publish(self.trainer.accelerator.unwrap_model(self.trainer.model))


METRICS = {"learning_rate": "lr", "clip_ratio/region_mean": "clip_fraction"}
"""Metrics that TRL and April's learner both have: TRL's name -> April's name."""


class ProgressCallback(TrainerCallback):
    """Reports consumed batches with TRL's metrics, and durable checkpoints, to the run."""

    def __init__(self, owner: TrlRollouts, trainer: GRPOTrainer):
        self.owner, self.trainer = owner, trainer

    def on_log(self, *_: Any, logs: Mapping[str, Any], **__: Any) -> None:
        """Report the last batch as consumed, with the metrics `logs`, which TRL logs after the end of a step and before
        it saves a checkpoint. TRL's last log is about the whole training and has no loss; it is ignored."""
        if "loss" in logs:
            self.owner.metrics = {
                METRICS.get(name, name): value for name, value in logs.items() if isinstance(value, int | float)
            }
            self.owner.report_consumed()

    def on_save(self, arguments: GRPOConfig, *_: Any, **__: Any) -> None:
        if self.owner.batch:
            self.owner.report_consumed()
            folders, step = step_folders(Path(arguments.output_dir), CHECKPOINT_PREFIX), self.owner.run.step
            self.owner.report_checkpoint(step, folders[step], oldest=min(folders))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.vllm_generation.sync_weights()
        if self.owner.is_trained:
            self.owner.run.take()


def connect(
    config: str | Path | Sequence[Path],
    arguments: GRPOConfig,
    run: str = rollouts.LOCAL,
    overrides: Mapping[str, Any] | None = None,
) -> TrlRollouts:
    """Connect TRL's trainer to the run of the TOML file `config`, from the newest complete checkpoint in
    `arguments.output_dir` on. `run`: "local" starts broker and workers here; tcp://HOST:PORT, or a run folder, connects
    to a running broker. `overrides`: values of configuration keys. Raises ConfigError for `arguments` that do not fit
    the run, and what `april.connect` raises."""
    folders = step_folders(Path(arguments.output_dir), CHECKPOINT_PREFIX)
    complete = {step: folder for step, folder in folders.items() if is_complete(folder, step)}
    step = max(complete, default=0)
    connected = connect_checked(config, step, run, partial(check, arguments=arguments), overrides)
    return TrlRollouts(connected, arguments, str(complete[step]) if complete else None)


def check(config: Config, arguments: GRPOConfig) -> None:
    """Check that one batch is one optimizer step, and that both sides define log-probabilities alike. Raises
    ConfigError."""
    schedule = config.schedule
    fitting = {
        "num_generations": schedule.n_samples_per_prompt,
        "generation_batch_size": schedule.rollout_batch_size * schedule.n_samples_per_prompt,
        "steps_per_generation": arguments.gradient_accumulation_steps,
        "num_iterations": 1,
        "max_steps": schedule.max_steps,
        "temperature": config.sampling.temperature,
    }
    options = {f"GRPOConfig.{name}": (getattr(arguments, name), value) for name, value in fitting.items()}
    check_options(config, "TRL", options)


def score_by_length(score: Score, model: Any, ids: Tensor, mask: Tensor, logits_to_keep: int, **options: Any) -> Scores:
    """`GRPOTrainer`'s log-probabilities and entropies, computed on `batch_size` rows of similar length at a time, each
    padded only to its own longest response. Values are the same; columns beyond that response are 0.

    `ids`, `mask`: [B, P + C], prompts padded on the left, the C = `logits_to_keep` response tokens on the right.
    `score`: TRL's own function.
    """
    size, entropy = options.pop("batch_size", None) or len(ids), options.pop("compute_entropy", False)
    if any(value is not None and value is not False for value in options.values()):
        return score(model, ids, mask, logits_to_keep, batch_size=size, compute_entropy=entropy, **options)
    lengths = mask[:, -logits_to_keep:].sum(1)
    order = lengths.argsort()
    parts = []
    for rows in order.split(size):
        padding = logits_to_keep - max(1, int(lengths[rows].max()))
        end = ids.shape[1] - padding
        scores = score(
            model, ids[rows, :end], mask[rows, :end], logits_to_keep - padding, batch_size=size, compute_entropy=entropy
        )
        parts.append([None if each is None else pad(each, (0, padding)) for each in scores[:2]])
    original_order = order.argsort()
    logprobs, entropies = (
        None if each[0] is None else torch.cat(each)[original_order] for each in zip(*parts, strict=True)
    )
    assert logprobs is not None
    return logprobs, entropies, None


def group_by_length(trainer: GRPOTrainer, prepare: Callable[[Any], Any], batch: Any) -> Any:
    """Result of `prepare(batch)`, TRL's own `GRPOTrainer._prepare_inputs`. If the loss is a sum over rows, the rows are
    sorted by length before they are divided into micro-batches; otherwise they stay in TRL's order."""
    before = trainer._buffered_inputs
    inputs = prepare(batch)
    batches = trainer._buffered_inputs
    if batches is None or batches is before or not sums_over_rows(trainer):
        return inputs
    if not all(value is None or isinstance(value, Tensor) for value in batches[0].values()):
        return inputs
    complete = {
        key: first if is_shared(first) else torch.cat([part[key] for part in batches])
        for key, first in batches[0].items()
    }
    order = complete["completion_mask"].sum(1).argsort()
    sorted_rows = {key: value if is_shared(value) else value[order] for key, value in complete.items()}
    trainer._buffered_inputs = split_tensor_dict(sorted_rows, len(batches))
    return trainer._buffered_inputs[trainer._step % len(batches)]


def sums_over_rows(trainer: GRPOTrainer) -> bool:
    """Whether the loss of a step does not depend on which rows share a micro-batch."""
    has_own_mean = trainer.loss_type == "bnpo" or trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1.0
    return not has_own_mean and not trainer.aux_loss_enabled


def is_shared(value: Any) -> bool:
    """Whether a value of the batch applies to all rows together (None or a scalar)."""
    return value is None or value.ndim == 0


def to_trl(samples: list[TrainSample]) -> dict[str, list[Any]]:
    """The samples as the columns that TRL expects of a `rollout_func`."""
    return {
        "prompt_ids": [sample.tokens[: sample.prompt_tokens].tolist() for sample in samples],
        "completion_ids": [sample.tokens[sample.prompt_tokens :].tolist() for sample in samples],
        "logprobs": [sample.logprobs.tolist() for sample in samples],
        "env_mask": [sampled_mask(sample).tolist() for sample in samples],
        REWARD_COLUMN: [float(sample.reward) for sample in samples],
    }


def is_complete(checkpoint: Path, step: int) -> bool:
    """Whether TRL's checkpoint of that step is complete, that is, has the state file, which TRL writes last."""
    try:
        return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step == step
    except (OSError, ValueError, TypeError):
        return False
