"""slime's trainer on April's rollouts: the function for `--rollout-function-path`.

    --rollout-function-path april.trainers.adapters.slime.generate_rollout
    --update-weight-transport disk --update-weight-disk-dir DIR --update-weight-disk-keep-files
    --custom-config-path own.yaml           # run_config: my-run.toml

slime's data source supplies the prompts, its actor writes each version of the weights to a folder, and the run's
schedule over-samples, resumes and filters. One batch is one slime step."""

import atexit
from argparse import Namespace
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

from april.config import Config
from april.data.tokenizer import Tokenizer
from april.learner.batch import TrainSample
from april.trainers import rollouts
from april.trainers.adapters.parts import (
    TrainerRun,
    connect_checked,
    fill_group,
    latest_step,
    read_tensors,
    sampled_mask,
    step_folders,
)
from april.trainers.rollouts import Prompt, RolloutBatch, Rollouts
from april.util.errors import refuse

WEIGHTS_PREFIX = "weight_v"
"""Prefix of the folder names to which slime's actor writes its weight versions."""
LATEST_FILE = "latest_checkpointed_iteration.txt"
SPREAD_FILTERS = "nonzero_std"
"""Suffix of the names of slime's dynamic-sampling filters that drop groups whose rewards are all equal."""


class SlimeRollouts(TrainerRun):
    """Adapter through which slime's rollout manager takes batches from a run."""

    def __init__(self, args: Namespace, run: Rollouts):
        super().__init__(run)
        self.args = args
        self._tokenizer = Tokenizer(run.config.model.path)

    def generate(self, rollout_id: int, source: Any) -> RolloutFnTrainOutput:
        """The groups of slime's step `rollout_id`; first submits prompts of slime's data source `source`. Unfinished
        samples of other groups stay with the broker and are resumed first."""
        if rollout_id != self.run.step:
            raise RuntimeError(
                f"slime is at {rollout_id} and the run at {self.run.step}; go on from the same checkpoint"
            )
        self.publish()
        batch = self.take_submitted(partial(self._submit_prompts, source), "--num-rollout")
        size = self.run.config.schedule.n_samples_per_prompt
        groups = [
            self._samples(fill_group(group, size), origin)
            for group, origin in zip(batch.groups, batch.extras, strict=True)
        ]
        return RolloutFnTrainOutput(samples=groups, metrics={"rollout/april/staleness": staleness(batch)})

    def _submit_prompts(self, source: Any) -> None:
        """Submit the next groups of slime's data source as prompts, under slime's own group numbers: as many as April
        generates at a time, at least one batch. The run skips those that were submitted before a restart."""
        schedule = self.run.config.schedule
        groups = source.get_samples(max(schedule.groups_per_round, schedule.rollout_batch_size))
        self.run.submit([prompt_of(group) for group in groups], first=groups[0][0].group_index)

    def _samples(self, group: list[TrainSample], origin: dict[str, Any]) -> list[Sample]:
        """slime's own `Sample` objects of a group, filled with the sampled responses. `origin`: the `extra` that was
        submitted with the group's prompt (see `prompt_of`)."""
        return [
            self._fill_sample(Sample.from_dict(deepcopy(origin["sample"]) | {"index": index}), sample)
            for index, sample in zip(origin["indices"], group, strict=True)
        ]

    def _fill_sample(self, slime_sample: Sample, sample: TrainSample) -> Sample:
        response = sample.tokens[sample.prompt_tokens :]
        slime_sample.tokens, slime_sample.response_length = sample.tokens.tolist(), sample.response_tokens
        slime_sample.response = self._tokenizer.decode(response)
        slime_sample.loss_mask = sampled_mask(sample).tolist()
        slime_sample.rollout_log_probs = sample.logprobs.tolist()
        slime_sample.weight_versions = [str(version.step) for _, _, version in sample.segments]
        slime_sample.reward = {self.args.reward_key: sample.reward} if self.args.reward_key else sample.reward
        slime_sample.status = Sample.Status.TRUNCATED if sample.finish_reason == "length" else Sample.Status.COMPLETED
        if sample.support:
            slime_sample.rollout_top_p_token_ids = sample.support.ids.tolist()
            slime_sample.rollout_top_p_token_offsets = [0, *np.cumsum(sample.support.counts).tolist()]
        return slime_sample

    def publish(self) -> None:
        """Report the last batch as consumed, and publish the newest weights that slime's actor has written."""
        self.report_consumed()
        self.report_checkpoint(saved_step(self.args.save), Path(self.args.save or ""))
        folders = step_folders(Path(self.args.update_weight_disk_dir), WEIGHTS_PREFIX)
        if not folders:
            raise RuntimeError(
                f"slime has written no weights to {self.args.update_weight_disk_dir}; give it "
                "--update-weight-transport disk and --update-weight-disk-keep-files"
            )
        self.run.publish(read_tensors(folders[max(folders)]))

    def finish(self) -> None:
        """Publish the last weights if slime has trained all steps, and close the connection."""
        if self.is_trained and self.batch:
            self.publish()
            self.close()
        else:
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
    step = args.start_rollout_id or 0
    return SlimeRollouts(args, connect_checked(args.run_config, step, address, partial(check, args)))


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
    for option, (given, fitting) in {
        "rollout-batch-size": (args.rollout_batch_size, schedule.rollout_batch_size),
        "over-sampling-batch-size": (args.over_sampling_batch_size, schedule.groups_per_round),
        "n-samples-per-prompt": (args.n_samples_per_prompt, schedule.n_samples_per_prompt),
        "partial-rollout": (args.partial_rollout, schedule.partial_rollout),
        "dynamic-sampling-filter-path": (spread, schedule.dynamic_sampling),
        "num-rollout": (args.num_rollout, schedule.max_steps),
        "rollout-temperature": (args.rollout_temperature, sampling.temperature),
        "rollout-top-p": (args.rollout_top_p, sampling.top_p),
        "rollout-max-response-len": (args.rollout_max_response_len, sampling.max_response_tokens),
    }.items():
        if given != fitting:
            refuse(f"--{option}", None, f"is {given!r} in slime and {fitting!r} in the run", "make them the same")


def prompt_of(group: list[Sample]) -> Prompt:
    """The prompt of one of slime's groups, as April takes it. Its `extra` has the fields of slime's own sample and the
    samples' indices, and comes back with the group."""
    first = group[0]
    fields = {name: value for name, value in first.to_dict().items() if name != "index"}
    indices = [sample.index for sample in group]
    return Prompt(first.prompt, str(first.label or ""), extra={"sample": fields, "indices": indices})


def saved_step(save: str | None) -> int:
    """Policy step of slime's newest checkpoint in the folder `save`, one above its rollout id; 0 without one, or
    if `save` is None."""
    latest = latest_step(Path(save, LATEST_FILE)) if save else None
    return 0 if latest is None else latest + 1


def staleness(batch: RolloutBatch) -> float:
    """Mean staleness of the batch's sampled tokens, in policy steps."""
    sampled = batch.versions[batch.response_mask]
    return batch.step - sampled.float().mean().item() if len(sampled) else 0.0
