"""slime's trainer on April's rollouts: the function that `--rollout-function-path` names.

    --rollout-function-path april.adapters.slime.generate_rollout
    --update-weight-transport disk --update-weight-disk-dir DIR --update-weight-disk-keep-files
    --custom-config-path own.yaml           # run_config: my-run.toml

slime's data source brings the prompts, its actor writes each version of the weights to a folder, and the run's schedule
over-samples, resumes and filters. One batch is one step of slime's.
"""

import atexit
from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

from april import rollouts
from april.adapters.parts import filled, sync_all, tensors_in
from april.config import Config, ConfigError
from april.data.tokenizer import Tokenizer
from april.learner.batch import TrainSample
from april.rollouts import Prompt, PromptsWanted, RolloutBatch, Rollouts

WEIGHTS = "weight_v"
"""begins the folder of a version"""
NEWEST = "latest_checkpointed_iteration.txt"
SPREAD_FILTERS = "nonzero_std"
"""ends the names of slime's filters that leave out groups without a spread of rewards"""


class SlimeRollouts:
    """A run under slime's rollout manager."""

    def __init__(self, args: Namespace, run: Rollouts):
        self.args, self.run = args, run
        self.batch: RolloutBatch | None = None
        """in training"""
        self._tokenizer = Tokenizer(run.config.model.path)
        self._durable = run.step

    def generate(self, rollout_id: int, source: Any) -> RolloutFnTrainOutput:
        """The groups of step `rollout_id`; of the others what there is of them is kept, and resumed first."""
        if rollout_id != self.run.step:
            raise RuntimeError(
                f"slime is at {rollout_id} and the run at {self.run.step}; go on from the same checkpoint"
            )
        self.publish()
        schedule = self.run.config.schedule
        ahead = max(schedule.groups_per_round, schedule.rollout_batch_size)
        while self.run.submitted < rollout_id * schedule.rollout_batch_size + ahead:
            self._bring(source, ahead)
        while True:
            try:
                self.batch = self.run.take()
                break
            except PromptsWanted:
                self._bring(source, ahead)
        if self.batch is None:
            raise RuntimeError(f"the run is over after {self.run.step} batches; lower --num-rollout to that")
        size = schedule.n_samples_per_prompt
        groups = [
            self._samples(filled(group, size), origin)
            for group, origin in zip(self.batch.groups, self.batch.extras, strict=True)
        ]
        return RolloutFnTrainOutput(samples=groups, metrics={"rollout/april/staleness": staleness(self.batch)})

    def _bring(self, source: Any, count: int) -> None:
        """Groups of slime's data source, which numbers them; those that it has brought before are passed over."""
        groups = source.get_samples(count)
        self.run.submit([prompt_of(group) for group in groups], first=groups[0][0].group_index)

    def _samples(self, group: list[TrainSample], origin: dict[str, Any]) -> list[Sample]:
        """slime's own, with what has been sampled for them."""
        return [
            self._filled_in(Sample.from_dict(deepcopy(origin["sample"]) | {"index": index}), sample)
            for index, sample in zip(origin["indices"], group, strict=True)
        ]

    def _filled_in(self, theirs: Sample, sample: TrainSample) -> Sample:
        response = sample.tokens[sample.prompt_tokens :]
        mask = np.zeros(sample.response_tokens, np.int64)
        mask[sample.sampled] = 1
        theirs.tokens, theirs.response_length = sample.tokens.tolist(), sample.response_tokens
        theirs.response = self._tokenizer.decode(response)
        theirs.loss_mask, theirs.rollout_log_probs = mask.tolist(), sample.logprobs.tolist()
        theirs.weight_versions = [str(version.step) for _, _, version in sample.segments]
        theirs.reward = {self.args.reward_key: sample.reward} if self.args.reward_key else sample.reward
        theirs.status = Sample.Status.TRUNCATED if sample.finish_reason == "length" else Sample.Status.COMPLETED
        if sample.support:
            theirs.rollout_top_p_token_ids = sample.support.ids.tolist()
            theirs.rollout_top_p_token_offsets = [0, *np.cumsum(sample.support.counts).tolist()]
        return theirs

    def publish(self) -> None:
        """Bring the newest weights that slime's actor has written, and say what has become of the last batch."""
        if self.batch:
            self.run.consumed(self.batch, {"reward": self.batch.rewards.mean().item()})
        self._tell_checkpoint()
        folders = sorted(Path(self.args.update_weight_disk_dir).glob(f"{WEIGHTS}[0-9]*"))
        if not folders:
            raise RuntimeError(
                f"slime has written no weights to {self.args.update_weight_disk_dir}; give it "
                "--update-weight-transport disk and --update-weight-disk-keep-files"
            )
        self.run.publish(tensors_in(folders[-1]))

    def _tell_checkpoint(self) -> None:
        saved = saved_step(self.args.save)
        if self._durable < saved <= self.run.step:
            sync_all(Path(self.args.save))
            self.run.durable(saved)
            self._durable = saved

    def finish(self) -> None:
        """slime leaves: the last batch is in its weights."""
        if self.run.step >= self.run.config.schedule.max_steps and self.batch:
            self.publish()
            self.run.take()
        self.run.__exit__(None, None, None)


current: list[SlimeRollouts] = []
"""the one of this process, once slime has asked for a batch"""


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """What slime calls. It evaluates by itself, on its own servers, which read the same weights."""
    if evaluation:
        from slime.rollout.sglang_rollout import generate_rollout as evaluate

        return evaluate(args, rollout_id, data_source, evaluation=True)
    if not current:
        current.append(connect(args))
        atexit.register(current[0].finish)
    return current[0].generate(rollout_id, data_source)


def connect(args: Namespace) -> SlimeRollouts:
    """As `run_config` and `run_address` of `--custom-config-path` say. Raises ConfigError."""
    if not getattr(args, "run_config", None):
        raise ConfigError("key 'run_config' is missing; name the TOML file of the run in --custom-config-path")
    address = getattr(args, "run_address", None) or rollouts.LOCAL
    run = rollouts.connect(args.run_config, args.start_rollout_id or 0, address)
    try:
        check(args, run.config)
    except ConfigError as error:
        run.__exit__(ConfigError, error, None)
        raise
    return SlimeRollouts(args, run)


def check(args: Namespace, config: Config) -> None:
    """That slime's options and the run say the same; slime's keep their names."""
    schedule, sampling = config.schedule, config.sampling
    spread = (args.dynamic_sampling_filter_path or "").endswith(SPREAD_FILTERS)
    if args.dynamic_sampling_filter_path and not spread:
        raise ConfigError(
            f"option '--dynamic-sampling-filter-path' = {args.dynamic_sampling_filter_path!r} does not run here; name "
            "a filter of your own in schedule.group_filter, and leave the option out"
        )
    if config.data.source != "submitted":
        raise ConfigError(
            f"key 'data.source' = {config.data.source!r}: slime brings the prompts; set it to 'submitted'"
        )
    for option, given, wanted in (
        ("rollout-batch-size", args.rollout_batch_size, schedule.rollout_batch_size),
        ("over-sampling-batch-size", args.over_sampling_batch_size, schedule.groups_per_round),
        ("n-samples-per-prompt", args.n_samples_per_prompt, schedule.n_samples_per_prompt),
        ("partial-rollout", args.partial_rollout, schedule.partial_rollout),
        ("dynamic-sampling-filter-path", spread, schedule.dynamic_sampling),
        ("num-rollout", args.num_rollout, schedule.max_steps),
        ("rollout-temperature", args.rollout_temperature, sampling.temperature),
        ("rollout-top-p", args.rollout_top_p, sampling.top_p),
        ("rollout-max-response-len", args.rollout_max_response_len, sampling.max_response_tokens),
    ):
        if given != wanted:
            raise ConfigError(
                f"option '--{option}' is {given!r} in slime and {wanted!r} in the run; make them the same"
            )


def prompt_of(group: list[Sample]) -> Prompt:
    """What April needs of a group, with the sample that slime has made for it."""
    first = group[0]
    own = {name: value for name, value in first.to_dict().items() if name != "index"}
    indices = [sample.index for sample in group]
    return Prompt(first.prompt, str(first.label or ""), extra={"sample": own, "indices": indices})


def saved_step(save: str | None) -> int:
    """Batches in slime's newest checkpoint, whose number is that of the last of them; 0 without one."""
    path = Path(save or "", NEWEST)
    return int(path.read_text()) + 1 if save and path.is_file() else 0


def staleness(batch: RolloutBatch) -> float:
    """Mean over the sampled tokens, in steps."""
    sampled = batch.versions[batch.response_mask]
    return batch.step - sampled.float().mean().item() if len(sampled) else 0.0
