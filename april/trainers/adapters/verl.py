"""verl's trainer on April's rollouts: takes a `DataProto` of prompts, and returns one of trajectories.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=april.trainers.adapters.verl.AgentLoopManager
    actor_rollout_ref.rollout.checkpoint_manager_class=april.trainers.adapters.verl.CheckpointManager
    actor_rollout_ref.rollout.checkpoint_engine.backend=april
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=april.trainers.adapters.verl
    +actor_rollout_ref.rollout.custom.april.config=my-run.toml

Both managers live in the process of verl's trainer, the checkpoint engine in those of its actor, whose first rank
writes the weights to a folder that both can read. One batch is one verl step."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils import tensordict_utils
from verl.utils.metric import reduce_metrics
from verl.utils.ray_utils import auto_await

from april.config import Config
from april.learner.batch import TrainSample
from april.trainers import rollouts
from april.trainers.adapters.parts import (
    TrainerRun,
    check_options,
    check_own_prompts,
    connect_checked,
    full_groups,
    latest_step,
    sampled_mask,
    step_folders,
    tensors_of,
)
from april.trainers.rollouts import Prompt, Rollouts
from april.util.errors import refuse

BACKEND = "april"
LATEST_FILE = "latest_checkpointed_iteration.txt"
STEP_FOLDER = "global_step_"
METRICS = {"pg_clipfrac": "clip_fraction", "entropy_loss": "entropy"}
"""Metrics that verl and April's learner both have: verl's name -> April's name."""
EMPTY_FIELDS = ("turn_scores", "tool_rewards", "extras")
"""Non-tensor fields that verl expects of every trajectory and that April leaves empty."""


class AgentLoopManager(TrainerRun):
    """Replaces verl's agent loop manager: starts no agent loops, and takes batches of the run."""

    current: "AgentLoopManager | None" = None
    """The instance of this process, through which `CheckpointManager` publishes weights; None before it is created."""

    def __init__(self, config: Any, run: Rollouts | None = None):
        """`config`: verl's whole configuration; `run`: an existing connection, by default that of
        `rollout.custom.april`."""
        self.config, self.rollout = config, config.actor_rollout_ref.rollout
        self.checkpoints = Path(config.trainer.default_local_dir)
        own = (self.rollout.get("custom") or {}).get("april") or {}
        if run is None:
            if not own.get("config"):
                refuse(
                    "actor_rollout_ref.rollout.custom.april.config", None, "is missing", "name the TOML file of the run"
                )
            address = own.get("run", rollouts.LOCAL)
            run = connect_checked(own["config"], resumed_step(config.trainer), address, partial(check, options=config))
        super().__init__(run)
        AgentLoopManager.current = self

    @classmethod
    @auto_await
    async def create(cls, config: Any, *_: Any, **__: Any) -> "AgentLoopManager":
        """Create the manager, with the signature of verl's own `create`; servers, teacher and reward loop are
        ignored."""
        return cls(config)

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The next batch. Raises RuntimeError if verl validates, which April does itself, and if the run is over before
        verl is.

        With `data.source` = "submitted" the batch has these prompts in their order. Otherwise it has prompts that April
        has drawn, and the fields that verl keeps of its rows, such as `reward_model`, do not belong to them.
        """
        if prompts.meta_info.get("validate"):
            raise RuntimeError(
                "verl cannot validate on April's rollouts; set trainer.test_freq=-1 and "
                "trainer.val_before_train=False, evaluation.every is April's"
            )
        started, step = time.perf_counter(), int(prompts.meta_info["global_steps"]) - 1
        if step != self.run.step:
            raise RuntimeError(f"verl is at step {step} and the run at {self.run.step}; go on from the same checkpoint")
        self._report_newest()
        schedule = self.run.config.schedule
        if self.run.config.data.source == "submitted":
            first = step * schedule.rollout_batch_size
            self.run.submit(prompts_of(prompts, schedule.n_samples_per_prompt), first=first)
        groups = full_groups(self.take("trainer.total_training_steps"), schedule.n_samples_per_prompt)
        samples = [sample for group in groups for sample in group]
        output = to_proto(samples, self.rollout.prompt_length, self.rollout.response_length)
        output.meta_info["timing"] = {"agent_loop/april/take": time.perf_counter() - started}
        return output

    def _report_newest(self) -> None:
        """Report verl's newest checkpoint as durable once it is synced to disk."""
        if saved := newest_step(self.checkpoints):
            folders = step_folders(self.checkpoints, STEP_FOLDER)
            self.report_checkpoint(saved, folders[saved], oldest=min(folders))

    def watch(self, actor: Any) -> None:
        """Wrap `update_actor` of verl's actor so that the metrics of each update are kept for the report on its batch:
        verl itself logs them only after it has sent the weights."""
        update = actor.update_actor

        def update_and_keep(batch: Any) -> Any:
            output = update(batch)
            reduced = reduce_metrics(dict(tensordict_utils.get(output, "metrics") or {}))
            named = {name.removeprefix("actor/"): float(value) for name, value in reduced.items()}
            self.metrics = {METRICS.get(name, name): value for name, value in named.items()}
            return output

        actor.update_actor = update_and_keep

    def publish(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Publish the trainer's current weights; after the last step the run ends."""
        self.report_consumed()
        self.run.publish(weights)
        if self.is_trained:
            self._report_newest()
            self.close()


@CheckpointEngineRegistry.register(BACKEND)
class SnapshotEngine(CheckpointEngine):
    """Checkpoint engine in each process of verl's actor; the first rank writes whole weights to a folder."""

    def __init__(self, bucket_size: int = 0, is_master: bool = False, folder: str = "", **_: Any):
        self.is_master, self.folder = is_master, snapshot_folder(folder)

    async def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Write the weights to the folder, on the first rank, as `STEP.safetensors`, where STEP is `global_steps`,
        verl's step. Collective: every rank has to iterate over all `weights`."""
        whole = {}
        for name, tensor in weights:
            if self.is_master:
                whole[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if self.is_master:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, self.folder / "partial")
            (self.folder / "partial").replace(self.folder / f"{global_steps}.safetensors")

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict, dict]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise NotImplementedError("verl's own servers take no part in a run of April's")


class CheckpointManager(CheckpointEngineManager):
    """Publishes the actor's weights to April's workers instead of verl's servers, which stay asleep."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        assert AgentLoopManager.current, "verl makes the manager of rollouts first"
        AgentLoopManager.current.watch(self.actor_wg)

    def update_weights(self, global_steps: int | None = None) -> dict:
        ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=BACKEND))
        own = (self.config.engine_kwargs or {}).get(BACKEND, {})
        path = snapshot_folder(own.get("folder", "")) / f"{global_steps}.safetensors"
        assert AgentLoopManager.current, "verl makes the manager of rollouts first"
        AgentLoopManager.current.publish(tensors_of(path))
        path.unlink()
        return {}


def snapshot_folder(folder: str) -> Path:
    return Path(folder or Path(tempfile.gettempdir(), f"april-verl-{os.getuid()}"))


def prompts_of(prompts: DataProto, size: int) -> list[Prompt]:
    """The distinct prompts of a batch in which verl has repeated each one in `size` consecutive rows."""
    return [prompt_of(prompts[row].non_tensor_batch) for row in range(0, len(prompts), size)]


def prompt_of(row: dict[str, Any]) -> Prompt:
    messages = row["raw_prompt"]
    label = (row.get("reward_model") or {}).get("ground_truth", "")
    return Prompt(messages if isinstance(messages, str) else list(messages), str(label))


def check(config: Config, options: Any) -> None:
    """Check that one batch is one verl step, and that both sides define log-probabilities alike. `options`: verl's
    whole configuration. Raises ConfigError."""
    schedule, rollout = config.schedule, options.actor_rollout_ref.rollout
    theirs = {
        "data.train_batch_size": (options.data.train_batch_size, schedule.rollout_batch_size),
        "actor_rollout_ref.rollout.n": (rollout.n, schedule.n_samples_per_prompt),
        "actor_rollout_ref.rollout.temperature": (rollout.temperature, config.sampling.temperature),
        "actor_rollout_ref.rollout.response_length": (rollout.response_length, config.sampling.max_response_tokens),
    }
    check_options(config, "verl", theirs)
    check_own_prompts(config, "verl")


def to_proto(samples: Sequence[TrainSample], prompt_length: int, response_length: int) -> DataProto:
    """The samples as a `DataProto`: prompts [B, `prompt_length`] padded on the left, responses [B, `response_length`]
    padded on the right, rewards at the last token."""
    longest = max(sample.prompt_tokens for sample in samples)
    if longest > prompt_length:
        raise RuntimeError(f"a prompt has {longest} tokens; raise verl's data.max_prompt_length = {prompt_length}")
    columns: dict[str, list[Tensor]] = {
        name: []
        for name in ("prompts", "responses", "response_mask", "attention_mask", "rollout_log_probs", "rm_scores")
    }
    for sample in samples:
        first, length = sample.prompt_tokens, sample.response_tokens
        ids, left, right = torch.tensor(sample.tokens).long(), prompt_length - first, response_length - length
        score = torch.zeros(response_length)
        score[length - 1] = sample.reward
        columns["prompts"].append(pad(ids[:first], (left, 0)))
        columns["responses"].append(pad(ids[first:], (0, right)))
        columns["response_mask"].append(pad(torch.from_numpy(sampled_mask(sample)), (0, right)))
        columns["attention_mask"].append(pad(torch.ones(len(ids), dtype=torch.int64), (left, right)))
        columns["rollout_log_probs"].append(pad(torch.tensor(sample.logprobs), (0, right)))
        columns["rm_scores"].append(score)
    tensors = {name: torch.stack(rows) for name, rows in columns.items()}
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    steps = [[version.step for _, _, version in sample.segments] for sample in samples]
    objects: dict[str, list[Any]] = {name: [None] * len(samples) for name in EMPTY_FIELDS}
    objects["multi_modal_inputs"] = [{} for _ in samples]
    objects["min_global_steps"] = [min(versions, default=None) for versions in steps]
    objects["max_global_steps"] = [max(versions, default=None) for versions in steps]
    others = {name: np.fromiter(values, dtype=object, count=len(samples)) for name, values in objects.items()}
    others["__num_turns__"] = np.array([2 * max(1, len(turn_starts(sample))) for sample in samples], np.int32)
    return DataProto(TensorDict(tensors, batch_size=len(samples)), others, {"reward_extra_keys": []})


def turn_starts(sample: TrainSample) -> list[int]:
    """Positions in the response at which turns of the policy start: at 0, or after an observation."""
    ends = [0, *(end for _, end, _ in sample.segments)]
    return [start for (start, _, _), end in zip(sample.segments, ends, strict=False) if start == 0 or start > end]


def newest_step(checkpoints: Path) -> int:
    """Policy step of the newest checkpoint; 0 without one."""
    return latest_step(checkpoints / LATEST_FILE) or 0


def resumed_step(trainer: Any) -> int:
    if trainer.resume_mode == "disable":
        return 0
    if trainer.resume_mode == "resume_path":
        return int(Path(trainer.resume_from_path).name.removeprefix(STEP_FOLDER))
    return newest_step(Path(trainer.default_local_dir))
