"""slime's trainer on April's rollouts: the function for `--rollout-function-path`.

    --rollout-function-path april.trainers.adapters.slime.generate_rollout
    --update-weight-transport disk --update-weight-disk-dir DIR --update-weight-disk-keep-files
    --custom-config-path own.yaml           # run_config: my-run.toml

slime's data source supplies the prompts, its actor writes each version of the weights to a folder, and the run's
schedule over-samples, resumes and filters. One batch is one slime step."""

import atexit
from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

from april.config import Config, ConfigError
from april.data.tokenizer import Tokenizer
from april.learner.batch import TrainSample
from april.trainers import rollouts
from april.trainers.adapters.parts import fill_group, read_tensors, sync_folder
from april.trainers.rollouts import Prompt, PromptsWanted, RolloutBatch, Rollouts
from april.util.errors import refuse

WEIGHTS_PREFIX = "weight_v"
"""Prefix of the folder names to which slime's actor writes its weight versions."""
LATEST_FILE = "latest_checkpointed_iteration.txt"
SPREAD_FILTERS = "nonzero_std"
"""Suffix of the names of slime's dynamic-sampling filters that drop groups whose rewards are all equal."""


class SlimeRollouts:
    """Adapter through which slime's rollout manager takes batches from a run."""

    def __init__(self, args: Namespace, run: Rollouts):
        self.args, self.run = args, run
        self.batch: RolloutBatch | None = None
        """The batch on which slime is training; None if there is none."""
        self._tokenizer = Tokenizer(run.config.model.path)
        self._durable = run.step

    def generate(self, rollout_id: int, source: Any) -> RolloutFnTrainOutput:
        """The groups of slime's step `rollout_id`. Unfinished samples of other groups stay with the broker and are
        resumed first."""
        if rollout_id != self.run.step:
            raise RuntimeError(
                f"slime is at {rollout_id} and the run at {self.run.step}; go on from the same checkpoint"
            )
        self.publish()
        schedule = self.run.config.schedule
        ahead = max(schedule.groups_per_round, schedule.rollout_batch_size)
        while self.run.submitted < rollout_id * schedule.rollout_batch_size + ahead:
            self._submit_prompts(source, ahead)
        while True:
            try:
                self.batch = self.run.take()
                break
            except PromptsWanted:
                self._submit_prompts(source, ahead)
        if self.batch is None:
            raise RuntimeError(f"the run is over after {self.run.step} batches; lower --num-rollout to that")
        size = schedule.n_samples_per_prompt
        groups = [
            self._samples(fill_group(group, size), origin)
            for group, origin in zip(self.batch.groups, self.batch.extras, strict=True)
        ]
        return RolloutFnTrainOutput(samples=groups, metrics={"rollout/april/staleness": staleness(self.batch)})

    def _submit_prompts(self, source: Any, count: int) -> None:
        """Submit the next `count` groups of slime's data source, numbered as there; groups submitted before a restart
        are skipped."""
        groups = source.get_samples(count)
        self.run.submit([prompt_of(group) for group in groups], first=groups[0][0].group_index)

    def _samples(self, group: list[TrainSample], origin: dict[str, Any]) -> list[Sample]:
        """slime's own `Sample` objects of a group, filled with the sampled responses."""
        return [
            self._fill_sample(Sample.from_dict(deepcopy(origin["sample"]) | {"index": index}), sample)
            for index, sample in zip(origin["indices"], group, strict=True)
        ]

    def _fill_sample(self, slime_sample: Sample, sample: TrainSample) -> Sample:
        response = sample.tokens[sample.prompt_tokens :]
        mask = np.zeros(sample.response_tokens, np.int64)
        mask[sample.sampled_positions] = 1
        slime_sample.tokens, slime_sample.response_length = sample.tokens.tolist(), sample.response_tokens
        slime_sample.response = self._tokenizer.decode(response)
        slime_sample.loss_mask, slime_sample.rollout_log_probs = mask.tolist(), sample.logprobs.tolist()
        slime_sample.weight_versions = [str(version.step) for _, _, version in sample.segments]
        slime_sample.reward = {self.args.reward_key: sample.reward} if self.args.reward_key else sample.reward
        slime_sample.status = Sample.Status.TRUNCATED if sample.finish_reason == "length" else Sample.Status.COMPLETED
        if sample.support:
            slime_sample.rollout_top_p_token_ids = sample.support.ids.tolist()
            slime_sample.rollout_top_p_token_offsets = [0, *np.cumsum(sample.support.counts).tolist()]
        return slime_sample

    def publish(self) -> None:
        """Report the last batch as consumed, and publish the newest weights that slime's actor has written."""
        if self.batch:
            self.run.consumed(self.batch, {"reward": self.batch.rewards.mean().item()})
        self._report_checkpoint()
        folders = sorted(Path(self.args.update_weight_disk_dir).glob(f"{WEIGHTS_PREFIX}[0-9]*"))
        if not folders:
            raise RuntimeError(
                f"slime has written no weights to {self.args.update_weight_disk_dir}; give it "
                "--update-weight-transport disk and --update-weight-disk-keep-files"
            )
        self.run.publish(read_tensors(folders[-1]))

    def _report_checkpoint(self) -> None:
        saved = saved_step(self.args.save)
        if self._durable < saved <= self.run.step:
            sync_folder(Path(self.args.save))
            self.run.durable(saved)
            self._durable = saved

    def finish(self) -> None:
        """Publish the last weights if slime has trained all steps, and close the connection."""
        if self.run.step >= self.run.config.schedule.max_steps and self.batch:
            self.publish()
            self.run.take()
        self.run.__exit__(None, None, None)


current: list[SlimeRollouts] = []
"""The adapter of this process, created when slime asks for the first batch."""


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """slime's rollout function: returns the groups of the next batch. Evaluation runs on slime's own servers, which
    load the same weights."""
    if evaluation:
        from slime.rollout.sglang_rollout import generate_rollout as evaluate

        return evaluate(args, rollout_id, data_source, evaluation=True)
    if not current:
        current.append(connect(args))
        atexit.register(current[0].finish)
    return current[0].generate(rollout_id, data_source)


def connect(args: Namespace) -> SlimeRollouts:
    """Connect to the run of `run_config` and `run_address` in `--custom-config-path`. Raises ConfigError."""
    if not getattr(args, "run_config", None):
        refuse("run_config", None, "is missing", "name the TOML file of the run in --custom-config-path")
    address = getattr(args, "run_address", None) or rollouts.LOCAL
    run = rollouts.connect(args.run_config, args.start_rollout_id or 0, address)
    try:
        check(args, run.config)
    except ConfigError as error:
        run.__exit__(ConfigError, error, None)
        raise
    return SlimeRollouts(args, run)


def check(args: Namespace, config: Config) -> None:
    """Check that slime's options agree with the run. Raises ConfigError with slime's option names."""
    schedule, sampling = config.schedule, config.sampling
    spread = (args.dynamic_sampling_filter_path or "").endswith(SPREAD_FILTERS)
    if args.dynamic_sampling_filter_path and not spread:
        refuse(
            "--dynamic-sampling-filter-path",
            args.dynamic_sampling_filter_path,
            "does not run here",
            "name a filter of your own in schedule.group_filter, and leave the option out",
        )
    if config.data.source != "submitted":
        refuse("data.source", config.data.source, "leaves out the prompts that slime brings", "set it to 'submitted'")
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
            refuse(f"--{option}", None, f"is {given!r} in slime and {wanted!r} in the run", "make them the same")


def prompt_of(group: list[Sample]) -> Prompt:
    """The prompt of a group, with slime's own sample as its extra."""
    first = group[0]
    fields = {name: value for name, value in first.to_dict().items() if name != "index"}
    indices = [sample.index for sample in group]
    return Prompt(first.prompt, str(first.label or ""), extra={"sample": fields, "indices": indices})


def saved_step(save: str | None) -> int:
    """Policy step of slime's newest checkpoint, one above its rollout id; 0 without one."""
    path = Path(save or "", LATEST_FILE)
    return int(path.read_text()) + 1 if save and path.is_file() else 0


def staleness(batch: RolloutBatch) -> float:
    """Mean staleness of the batch's sampled tokens, in policy steps."""
    sampled = batch.versions[batch.response_mask]
    return batch.step - sampled.float().mean().item() if len(sampled) else 0.0
