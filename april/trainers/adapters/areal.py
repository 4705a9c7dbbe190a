"""AReaL's trainer on April's rollouts: `ArealTrainer` in place of `areal.PPOTrainer`.

    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    with ArealTrainer("my-run.toml", config) as trainer:
        trainer.train()

A run replaces the inference engine: no servers are started, and no workflow is called. One batch is one AReaL step,
after which the actor writes the weights to a folder, and the adapter publishes them to April's workers.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from areal import PPOTrainer
from areal.api import InferenceEngine, RolloutWorkflow
from areal.utils.data import cycle_dataloader
from areal.utils.network import format_hostport, gethostip
from areal.utils.recover import InValidRecoverInfo, RecoverHandler, RecoverInfo
from torch import Tensor

from april.config import Config, ConfigError
from april.trainers import rollouts
from april.trainers.adapters.parts import TrainerRun, check_options, fill_group, read_tensors
from april.trainers.rollouts import Prompt, RolloutBatch, Rollouts
from april.util.errors import refuse
from april.wire.security.web_requests import CheckedRequestHandler

# --- options ----------------------------------------------------------------------------------------------------------

SPMD = "AREAL_SPMD_MODE"
"""Environment variable that enables AReaL's SPMD mode, in which every rank runs the whole trainer."""


def check(config: Config, theirs: Any, rows: Any = None) -> None:
    """Check that one batch is one AReaL step, and that both sides define log-probabilities alike. `theirs`: AReaL's
    configuration; `rows`: the trainer's prompts. Raises ConfigError."""
    if os.environ.get(SPMD, "").lower() in ("1", "true"):
        raise ConfigError(f"{SPMD} is set: every rank would ask for batches; start AReaL with scheduler.type=local")
    if config.data.source == "submitted" and rows is None:
        refuse("data.source", "submitted", "wants AReaL's rows", "give train_dataset")
    schedule, sampling, named = config.schedule, config.sampling, config.model.commit is not None
    options = {
        "actor.path": (theirs.actor.path if named else os.path.abspath(theirs.actor.path), config.model.named()),
        "actor.temperature": (theirs.actor.temperature, sampling.temperature),
        "actor.weight_update_mode": (theirs.actor.weight_update_mode, "disk"),
        "actor.use_lora": (theirs.actor.use_lora, False),
        "actor._version": (theirs.actor._version, "v1"),
        "train_dataset.batch_size": (theirs.train_dataset.batch_size, schedule.rollout_batch_size),
        "gconfig.n_samples": (theirs.gconfig.n_samples, schedule.n_samples_per_prompt),
        "gconfig.temperature": (theirs.gconfig.temperature, sampling.temperature),
        "gconfig.max_new_tokens": (theirs.gconfig.max_new_tokens, sampling.max_response_tokens),
        "dynamic_bs": (theirs.dynamic_bs, False),
    }
    check_options(config, "AReaL", options)


# --- trainer ----------------------------------------------------------------------------------------------------------


class UnusedWorkflow(RolloutWorkflow):
    """Placeholder for the rollout workflow that AReaL's trainer requires as an argument; never called, since April
    generates."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        raise RuntimeError("April's workers generate; leave workflow out")


class CountingLoader:
    """AReaL's data loader with a count of the drawn rows; AReaL's checkpoints store both."""

    def __init__(self, loader: Any):
        self.loader, self.batch_size, self.drawn = loader, loader.batch_size, 0
        self._batches: Iterator[list[dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return iter(self.loader)

    def draw(self) -> tuple[int, list[dict[str, Any]]]:
        """The next batch of rows, preceded by the number of the batch's first row, counted from 0 over all epochs:
        (number, rows)."""
        if self._batches is None:
            self._batches = cycle_dataloader(self.loader)
        first, rows = self.drawn, next(self._batches)
        self.drawn += len(rows)
        return first, rows

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.drawn, self._batches = state["drawn"], None


def prompt_of(row: dict[str, Any]) -> Prompt:
    """The prompt that a row stands for, if the row has the format of AReaL's own datasets."""
    return Prompt(row["messages"], str(row.get("answer", "")))


class ArealEngine(TrainerRun, InferenceEngine):
    """AReaL's interface of an inference engine, implemented by an April run: its batches come from the run, and it
    publishes AReaL's weights to the run's workers."""

    staleness_manager = None
    """AReaL's limiter of staleness, None here: the run's schedule bounds staleness instead."""

    def __init__(
        self,
        run: Rollouts,
        folder_of: Callable[[int], str],
        saved: Callable[[], tuple[int, Path]],
        prompt: Callable[[dict[str, Any]], Prompt] = prompt_of,
    ):
        """`folder_of`: version -> folder to which AReaL's actor writes its weights; `saved`: returns policy step (0
        without one) and folder of AReaL's newest checkpoint; `prompt`: row -> prompt."""
        super().__init__(run)
        self._folder_of, self._saved, self._prompt = folder_of, saved, prompt
        self._has_weights = False
        """Whether any weights have been published to the run yet."""
        self._server: ThreadingHTTPServer | None = None

    @property
    def initialized(self) -> bool:
        return True

    # --- rollouts -----------------------------------------------------------------------------------------------

    def prepare_batch(self, dataloader: CountingLoader, *_: Any, **__: Any) -> list[dict[str, Tensor]]:
        """The next batch, one dictionary per group. With `data.source` = "submitted" the loader's rows are its prompts;
        otherwise they only count AReaL's steps. Raises RuntimeError if the run is over before AReaL is."""
        config = self.run.config
        if not self._has_weights:
            self._publish(config.model.path)
        self.report_checkpoint(*self._saved())
        if config.data.source == "submitted":
            batch = self.take_submitted(partial(self._submit_prompts, dataloader), "total_train_steps")
        else:
            batch = self.take("total_train_steps")
        return trajectories(batch, config.schedule.n_samples_per_prompt)

    def _submit_prompts(self, rows: CountingLoader) -> None:
        """Submit the next rows of AReaL's data loader as prompts; the run skips those that were submitted before a
        crash."""
        first, drawn = rows.draw()
        self.run.submit([self._prompt(row) for row in drawn], first=first)

    def export_stats(self) -> dict[str, float]:
        assert self.batch, "AReaL exports after a step"
        ages = self.batch.step - self.batch.versions[self.batch.response_mask].float()
        return {"april/staleness": ages.mean().item(), "april/reward": self.batch.rewards.mean().item()}

    # --- weights ------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Publish the weights of policy step `version`, which the actor has written to their folder, and report the
        last batch as consumed. Raises RuntimeError if the run is at another step."""
        if version != self.run.step:
            raise RuntimeError(
                f"AReaL is at version {version} and the run at {self.run.step}; go on from the same checkpoint"
            )
        self.report_consumed()
        folder = Path(self._folder_of(version))
        self._publish(folder)
        shutil.rmtree(folder)

    def get_version(self) -> int:
        return self.run.step

    def _publish(self, folder: Path) -> None:
        self.run.publish(read_tensors(folder))
        self._has_weights = True

    @property
    def callback_addr(self) -> str:
        """Address to which the actor's processes post their progress; it is ignored."""
        if self._server is None:
            self._server = ThreadingHTTPServer((gethostip(), 0), CallbackHandler)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        host, port = self._server.server_address[:2]
        return format_hostport(str(host), port)

    # --- life ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Does nothing: April's workers continue while AReaL trains, as far as the schedule allows."""

    resume = pause_generation = continue_generation = offload = onload = pause

    def config_perf_tracer(self, *_: Any, **__: Any) -> None: ...

    def destroy(self) -> None:
        """Close the connection to the run. If all steps are trained, the run ends."""
        if self._server is not None:
            self._server.shutdown()
        self.report_checkpoint(*self._saved())
        self.close()


MAX_CALLBACK_BYTES = 1 << 20
"""Maximum number of bytes read of a progress report from AReaL's actor (a callback), whose content April does not
use."""


class CallbackHandler(CheckedRequestHandler):
    """Answers each progress report of AReaL's actor (a callback over HTTP) with an empty JSON object."""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length") or ""
        self.rfile.read(min(int(length), MAX_CALLBACK_BYTES) if re.fullmatch("[0-9]{1,9}", length) else 0)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None: ...


def trajectories(batch: RolloutBatch, size: int) -> list[dict[str, Tensor]]:
    """Each group in the format of AReaL's workflows: tensors [G, L] with G = `size` rows, padded on the right."""
    groups_ = []
    for number in range(len(batch.groups)):
        rows = torch.tensor(fill_group((batch.group == number).nonzero().flatten().tolist(), size))
        longest = int(batch.attention_mask[rows].sum(1).max())
        columns = {
            "input_ids": batch.input_ids.int(),
            "attention_mask": batch.attention_mask.bool(),
            "loss_mask": batch.response_mask.int(),
            "logprobs": batch.logprobs,
            "versions": batch.versions.int(),
        }
        groups_.append(
            {name: tensor[rows, :longest] for name, tensor in columns.items()} | {"rewards": batch.rewards[rows]}
        )
    return groups_


class ArealTrainer(PPOTrainer):
    """AReaL's trainer in single-controller mode, with rollouts from April."""

    def __init__(
        self,
        run_config: str | Path,
        config: Any,
        train_dataset: Any = None,
        prompt: Callable[[dict[str, Any]], Prompt] = prompt_of,
        run: str = rollouts.LOCAL,
        overrides: Mapping[str, Any] | None = None,
    ):
        """`run_config`: file of the run's configuration; `config`: AReaL's configuration; `train_dataset`: the prompts
        if `data.source` = "submitted", otherwise omitted; `prompt`: function that makes a prompt of one of its rows;
        `run`, `overrides`: as in `april.connect`."""
        opened = rollouts.connect(run_config, recovery_point(config.recover)[0], run, overrides)
        try:
            check(opened.config, config, train_dataset)
            schedule = opened.config.schedule
            self._engine = ArealEngine(
                opened,
                lambda version: self.weight_update_meta.with_version(version).path,
                lambda: recovery_point(config.recover),
                prompt,
            )
            if train_dataset is None:
                train_dataset = [{}] * (schedule.rollout_batch_size * schedule.max_steps)
            super().__init__(config, train_dataset)
        except BaseException as error:
            opened.__exit__(type(error), error, None)
            raise

    def _create_dataloader(self, *arguments: Any, **keys: Any) -> CountingLoader:
        return CountingLoader(super()._create_dataloader(*arguments, **keys))

    def _init_rollout(self, config: Any, is_eval: bool = False, lora_path: str | None = None) -> ArealEngine | None:
        """The inference engine for training; None if `is_eval`, as April evaluates instead (`evaluation.every`)."""
        return None if is_eval else self._engine

    def train(self) -> None:
        """Train all steps. Raises ConfigError if AReaL and the run have different numbers of steps."""
        steps = self.config.total_train_epochs * len(self.train_dataloader)
        steps = min(steps, self.config.total_train_steps or steps)
        run_steps = self._engine.run.config.schedule.max_steps
        if steps != run_steps:
            raise ConfigError(
                f"AReaL trains {steps} steps and the run {run_steps}; set total_train_steps or total_train_epochs"
            )
        super().train(workflow=UnusedWorkflow())


def recovery_point(recover: Any) -> tuple[int, Path]:
    """Policy step of AReaL's newest checkpoint, 0 without one, and the folder of its checkpoints."""
    names = recover.experiment_name, recover.trial_name, recover.fileroot
    info = Path(RecoverHandler.recover_info_path(*names))
    if recover.mode in ("disabled", "off"):
        return 0, info.parent
    try:
        return RecoverInfo.load(str(info)).last_step_info.global_step + 1, info.parent
    except (FileNotFoundError, InValidRecoverInfo):
        return 0, info.parent
