"""TRL's GRPOTrainer on April's rollouts.

    arguments = GRPOConfig(...)
    with april.adapters.trl.connect("my-run.toml", arguments) as rollouts:
        trainer = GRPOTrainer(
            model=...,
            args=arguments,
            train_dataset=rollouts.dataset,
            reward_funcs=rollouts.reward,
            rollout_func=rollouts.generate,
        )
        rollouts.train(trainer)

April draws the prompts, generates, and scores. TRL computes advantages, corrects for stale tokens by the behaviour
log-probabilities, trains and saves. One batch is one optimizer step. A checkpoint of TRL's makes its batch durable, and
`train` goes on from the newest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

from april import rollouts
from april.adapters.parts import filled, sync_all
from april.config import Config, ConfigError
from april.config.checks import cut_of
from april.learner.batch import TrainSample
from april.rollouts import RolloutBatch, Rollouts

REWARD = "april_reward"
"""what TRL hands on to `reward` with each sample"""
CHECKPOINT = "checkpoint-"
Scores: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
Score: TypeAlias = Callable[..., Scores]
"""log-probabilities [B, C], entropies, auxiliary loss"""


class TrlRollouts:
    """What `connect` gives: the parts that GRPOTrainer asks for, and the run behind them."""

    def __init__(self, run: Rollouts, arguments: GRPOConfig, resumed_from: str | None = None):
        """`resumed_from`: TRL's checkpoint that the trainer will go on from."""
        self.run, self.arguments, self.resumed_from = run, arguments, resumed_from
        self.batch: RolloutBatch | None = None
        """in training"""
        self._batches: Iterator[RolloutBatch] = run.batches()

    @property
    def dataset(self) -> Dataset:
        """Rows that count TRL's steps. Their prompts are not read: those of the run are."""
        schedule = self.run.config.schedule
        return Dataset.from_dict({"prompt": [""] * schedule.rollout_batch_size * schedule.max_steps})

    def reward(self, **columns: Any) -> list[float]:
        """What April's verifier has said of each sample."""
        return columns[REWARD]

    def generate(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """This process's share of the next batch, as `rollout_func` has to give it. Collective.

        The `prompts` are TRL's own and have no part in it. RuntimeError where the run is over before TRL is, and where
        TRL evaluates: April does that.
        """
        if not trainer.model.training:
            raise RuntimeError(
                "TRL cannot evaluate on April's rollouts; set eval_strategy='no', evaluation.every is April's"
            )
        self.batch = next(self._batches, None)
        if self.batch is None:
            raise RuntimeError(f"the run is over after {self.run.step} batches; lower max_steps to that")
        size = self.run.config.schedule.n_samples_per_prompt
        samples = [sample for group in self.batch.groups for sample in filled(group, size)]
        first = (dist.get_rank() if dist.is_initialized() else 0) * len(prompts)
        return described(samples[first : first + len(prompts)])

    def attach(self, trainer: GRPOTrainer) -> None:
        """Make a trainer take its rollouts, bring its weights, and report; done by `train`.

        TRL corrects by behaviour log-probabilities for a server's rollouts alone, and brings weights to that server
        before it generates. From here on that server is April.
        """
        trainer.use_vllm = True
        trainer.vllm_generation = WeightsToApril(self.run, trainer)
        trainer._last_loaded_step = -1
        trainer._get_per_token_logps_and_entropies = partial(by_length, trainer._get_per_token_logps_and_entropies)
        trainer._prepare_inputs = partial(of_like_length, trainer, trainer._prepare_inputs)
        trainer.add_callback(Reports(self, trainer))

    def train(self, trainer: GRPOTrainer) -> Any:
        """`trainer.train` from the newest checkpoint in `output_dir`, if there is one."""
        self.attach(trainer)
        return trainer.train(resume_from_checkpoint=self.resumed_from)

    def finish(self) -> None:
        """All batches are trained: the run may end, and evaluate the last weights."""
        if self.run.step >= self.run.config.schedule.max_steps:
            next(self._batches, None)

    def __enter__(self) -> "TrlRollouts":
        self.run.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self.run.__exit__(kind, error, trace)


class WeightsToApril:
    """In the place of TRL's generation server."""

    def __init__(self, run: Rollouts, trainer: GRPOTrainer):
        self.run, self.trainer = run, trainer

    def sync_weights(self) -> None:
        self.run.publish(self.trainer.accelerator.unwrap_model(self.trainer.model))


class Reports(TrainerCallback):
    """Tells April what has become of each batch."""

    def __init__(self, owner: TrlRollouts, trainer: GRPOTrainer):
        self.owner, self.trainer = owner, trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        batch = self.owner.batch
        assert batch, "a step is made of a batch"
        self.owner.run.consumed(batch, {"reward": batch.rewards.mean().item()})

    def on_save(self, arguments: GRPOConfig, *_: Any, **__: Any) -> None:
        if self.owner.batch:
            folders = checkpoints(arguments.output_dir)
            sync_all(folders[self.owner.run.step])
            self.owner.run.durable(self.owner.batch, oldest=min(folders))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.vllm_generation.sync_weights()
        self.owner.finish()


def connect(
    config: str | Path | Sequence[Path],
    arguments: GRPOConfig,
    run: str = rollouts.LOCAL,
    overrides: Mapping[str, Any] | None = None,
) -> TrlRollouts:
    """As `april.connect`, at the newest whole checkpoint in `arguments.output_dir`. Raises ConfigError for arguments
    that do not fit the run."""
    whole = {step: folder for step, folder in checkpoints(arguments.output_dir).items() if is_whole(folder)}
    step = max(whole, default=0)
    connected = rollouts.connect(config, step, run, overrides)
    try:
        check(connected.config, arguments)
    except ConfigError as error:
        connected.__exit__(ConfigError, error, None)
        raise
    return TrlRollouts(connected, arguments, str(whole[step]) if whole else None)


def check(config: Config, arguments: GRPOConfig) -> None:
    """That one batch is one optimizer step of TRL's, and that both mean the same by a log-probability."""
    schedule = config.schedule
    for name, wanted, why in (
        ("num_generations", schedule.n_samples_per_prompt, "schedule.n_samples_per_prompt"),
        (
            "generation_batch_size",
            schedule.rollout_batch_size * schedule.n_samples_per_prompt,
            "the samples of a batch of the run",
        ),
        ("steps_per_generation", arguments.gradient_accumulation_steps, "gradient_accumulation_steps"),
        ("num_iterations", 1, "one step a batch"),
        ("max_steps", schedule.max_steps, "schedule.max_steps"),
        ("temperature", config.sampling.temperature, "sampling.temperature"),
    ):
        if (given := getattr(arguments, name)) != wanted:
            raise ConfigError(f"GRPOConfig's '{name}' = {given!r} does not fit the run; set it to {wanted!r}, {why}")

    if config.sampling.is_cut:
        key, value = cut_of(config)
        raise ConfigError(
            f"key 'sampling.{key}' = {value} cuts the distribution, which TRL does not follow; leave it out"
        )


def by_length(score: Score, model: Any, ids: Tensor, mask: Tensor, logits_to_keep: int, **others: Any) -> Scores:
    """`GRPOTrainer`'s log-probabilities and entropies, not padded to the longest response of a batch, but to that of
    `batch_size` rows of like length. The same values; 0 behind the longest of them.

    `ids`, `mask`: [B, P + C], prompts padded on the left, the C = `logits_to_keep` of responses on the right.
    """
    size, entropy = others.pop("batch_size", None) or len(ids), others.pop("compute_entropy", False)
    if any(value is not None and value is not False for value in others.values()):
        return score(model, ids, mask, logits_to_keep, batch_size=size, compute_entropy=entropy, **others)
    lengths = mask[:, -logits_to_keep:].sum(1)
    order = lengths.argsort()
    found = []
    for rows in order.split(size):
        behind = logits_to_keep - max(1, int(lengths[rows].max()))
        end = ids.shape[1] - behind
        scores = score(
            model, ids[rows, :end], mask[rows, :end], logits_to_keep - behind, batch_size=size, compute_entropy=entropy
        )
        found.append([None if each is None else pad(each, (0, behind)) for each in scores[:2]])
    places = order.argsort()
    logprobs, entropies = (None if each[0] is None else torch.cat(each)[places] for each in zip(*found, strict=True))
    assert logprobs is not None
    return logprobs, entropies, None


def of_like_length(trainer: GRPOTrainer, prepare: Callable[[Any], Any], batch: Any) -> Any:
    """`GRPOTrainer._prepare_inputs`, with rows of like length in a micro-batch, where a step is the sum over its rows.
    Where a micro-batch has a mean of its own, its rows are those that TRL has mixed."""
    before = trainer._buffered_inputs
    inputs = prepare(batch)
    batches = trainer._buffered_inputs
    if batches is None or batches is before or not sums_over_rows(trainer):
        return inputs
    if not all(value is None or isinstance(value, Tensor) for value in batches[0].values()):
        return inputs
    whole = {
        key: first if is_one(first) else torch.cat([part[key] for part in batches]) for key, first in batches[0].items()
    }
    order = whole["completion_mask"].sum(1).argsort()
    sorted_rows = {key: value if is_one(value) else value[order] for key, value in whole.items()}
    trainer._buffered_inputs = split_tensor_dict(sorted_rows, len(batches))
    return trainer._buffered_inputs[trainer._step % len(batches)]


def sums_over_rows(trainer: GRPOTrainer) -> bool:
    """Whether it makes no difference to a step which rows share a micro-batch."""
    own_mean = trainer.loss_type == "bnpo" or trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1.0
    return not own_mean and not trainer.aux_loss_enabled


def is_one(value: Any) -> bool:
    """Whether it is of all rows together."""
    return value is None or value.ndim == 0


def described(samples: list[TrainSample]) -> dict[str, list[Any]]:
    masks = []
    for sample in samples:
        mask = [0] * sample.response_tokens
        for place in sample.sampled.tolist():
            mask[place] = 1
        masks.append(mask)
    return {
        "prompt_ids": [sample.tokens[: sample.prompt_tokens].tolist() for sample in samples],
        "completion_ids": [sample.tokens[sample.prompt_tokens :].tolist() for sample in samples],
        "logprobs": [sample.logprobs.tolist() for sample in samples],
        "env_mask": masks,
        REWARD: [float(sample.reward) for sample in samples],
    }


def checkpoints(output_dir: str) -> dict[int, Path]:
    """TRL's, by their step."""
    folders = Path(output_dir).glob(f"{CHECKPOINT}[0-9]*")
    return {step_of(folder): folder for folder in folders}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def is_whole(checkpoint: Path) -> bool:
    """A trainer that is killed while it saves leaves a part: the file that it reads here is the last that it writes."""
    try:
        return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step == step_of(checkpoint)
    except (OSError, ValueError, TypeError):
        return False
