"""AReaL's trainer on April's rollouts: `Trainer` in the place of `areal.PPOTrainer`.

    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    with Trainer("my-run.toml", config) as trainer:
        trainer.train()

Its inference engine is a run: no servers are started, and no workflow is called. One batch is one step of AReaL's, and
after it the actor leaves the weights in a folder, from which they go on to April's workers.
"""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from areal import PPOTrainer
from areal.api import InferenceEngine, RolloutWorkflow
from areal.utils.data import cycle_dataloader
from areal.utils.network import format_hostport, gethostip
from areal.utils.recover import InValidRecoverInfo, RecoverHandler, RecoverInfo
from torch import Tensor

from april import rollouts
from april.adapters.areal_options import check
from april.adapters.parts import filled, sync_all, tensors_in
from april.config import ConfigError
from april.rollouts import Prompt, PromptsWanted, RolloutBatch, Rollouts


class Workflow(RolloutWorkflow):
    """What AReaL's trainer has to be given, and nobody calls."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        raise RuntimeError("April's workers generate; leave workflow out")


class Rows:
    """AReaL's data loader, and how many rows were drawn of it: AReaL's checkpoints keep both."""

    def __init__(self, loader: Any):
        self.loader, self.batch_size, self.drawn = loader, loader.batch_size, 0
        self._batches: Iterator[list[dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return iter(self.loader)

    def draw(self) -> tuple[int, list[dict[str, Any]]]:
        """The number of the first, from 0 over all epochs, and the rows."""
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
    """Of a row as AReaL's own datasets have it."""
    return Prompt(row["messages"], str(row.get("answer", "")))


class Engine(InferenceEngine):
    """What AReaL's trainer asks of its rollout controller, answered by a run."""

    staleness_manager = None
    """the run's schedule bounds staleness"""

    def __init__(
        self,
        run: Rollouts,
        folder_of: Callable[[int], str],
        saved: Callable[[], tuple[int, Path]],
        prompt: Callable[[dict[str, Any]], Prompt] = prompt_of,
    ):
        """`folder_of`: where AReaL's actor leaves weights of a version; `saved`: step and folder of its checkpoint, 0
        without one; `prompt`: of a row of AReaL's."""
        self.run, self._folder_of, self._saved, self._prompt = run, folder_of, saved, prompt
        self.batch: RolloutBatch | None = None
        """in training"""
        self._durable = run.step
        self._brought = False
        """whether the run has been given weights"""
        self._server: ThreadingHTTPServer | None = None

    @property
    def initialized(self) -> bool:
        return True

    # --- rollouts -----------------------------------------------------------------------------------------------

    def prepare_batch(self, dataloader: Rows, *_: Any, **__: Any) -> list[dict[str, Tensor]]:
        """The next batch, a dictionary a group. With `data.source` = "submitted" the rows are its prompts; otherwise
        they only count AReaL's steps. RuntimeError where the run is over before AReaL is."""
        config = self.run.config
        if not self._brought:
            self._publish(config.model.path)
        self._tell_checkpoint()
        schedule = config.schedule
        ahead = max(schedule.groups_per_round, schedule.rollout_batch_size)
        wanted = self.run.step * schedule.rollout_batch_size + ahead
        while config.data.source == "submitted" and self.run.submitted < wanted:
            self._bring(dataloader)
        while True:
            try:
                self.batch = self.run.take()
                break
            except PromptsWanted:
                self._bring(dataloader)
        if self.batch is None:
            raise RuntimeError(f"the run is over after {self.run.step} batches; lower total_train_steps to that")
        return trajectories(self.batch, schedule.n_samples_per_prompt)

    def _bring(self, rows: Rows) -> None:
        """The next rows; those that were brought before a crash are passed over."""
        first, drawn = rows.draw()
        self.run.submit([self._prompt(row) for row in drawn], first=first)

    def export_stats(self) -> dict[str, float]:
        assert self.batch, "AReaL exports after a step"
        ages = self.batch.step - self.batch.versions[self.batch.response_mask].float()
        return {"april/staleness": ages.mean().item(), "april/reward": self.batch.rewards.mean().item()}

    # --- weights ------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """The actor has left weights `version` in their folder: they contain the last batch."""
        if version != self.run.step:
            raise RuntimeError(
                f"AReaL is at version {version} and the run at {self.run.step}; go on from the same checkpoint"
            )
        if self.batch:
            self.run.consumed(self.batch, {"reward": self.batch.rewards.mean().item()})
        folder = Path(self._folder_of(version))
        self._publish(folder)
        shutil.rmtree(folder)

    def get_version(self) -> int:
        return self.run.step

    def _publish(self, folder: Path) -> None:
        self.run.publish(tensors_in(folder))
        self._brought = True

    def _tell_checkpoint(self) -> None:
        """AReaL's checkpoint is durable once it is on disk."""
        step, folder = self._saved()
        if self._durable < step <= self.run.step:
            sync_all(folder)
            self.run.durable(step)
            self._durable = step

    @property
    def callback_addr(self) -> str:
        """Where the actor's processes say what they do; nothing of it is read."""
        if self._server is None:
            self._server = ThreadingHTTPServer((gethostip(), 0), Callback)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        host, port = self._server.server_address[:2]
        return format_hostport(str(host), port)

    # --- life ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """April's workers go on while AReaL trains, as far as the schedule lets them."""

    resume = pause_generation = continue_generation = offload = onload = pause

    def config_perf_tracer(self, *_: Any, **__: Any) -> None: ...

    def destroy(self) -> None:
        """With the last step the run ends."""
        if self._server is not None:
            self._server.shutdown()
        self._tell_checkpoint()
        if self.run.step >= self.run.config.schedule.max_steps:
            self.run.take()
        self.run.__exit__(None, None, None)


class Callback(BaseHTTPRequestHandler):
    """An empty answer to whatever is said."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None: ...


def trajectories(batch: RolloutBatch, size: int) -> list[dict[str, Tensor]]:
    """Each group as AReaL's workflows give it: G = `size` rows, [G, L], padded on the right."""
    found = []
    for number in range(len(batch.groups)):
        rows = torch.tensor(filled((batch.group == number).nonzero().flatten().tolist(), size))
        longest = int(batch.attention_mask[rows].sum(1).max())
        part = {
            "input_ids": batch.input_ids.int(),
            "attention_mask": batch.attention_mask.bool(),
            "loss_mask": batch.response_mask.int(),
            "logprobs": batch.logprobs,
            "versions": batch.versions.int(),
        }
        found.append({name: tensor[rows, :longest] for name, tensor in part.items()} | {"rewards": batch.rewards[rows]})
    return found


class Trainer(PPOTrainer):
    """AReaL's, in its single-controller mode."""

    def __init__(
        self,
        run_config: str | Path,
        config: Any,
        train_dataset: Any = None,
        prompt: Callable[[dict[str, Any]], Prompt] = prompt_of,
        run: str = rollouts.LOCAL,
        overrides: Mapping[str, Any] | None = None,
    ):
        """`config`: AReaL's; `train_dataset`: rows that are prompts where `data.source` = "submitted", otherwise left
        out; `run`, `overrides`: as of `april.connect`."""
        opened = rollouts.connect(run_config, recovered(config.recover)[0], run, overrides)
        try:
            check(opened.config, config, train_dataset)
            schedule = opened.config.schedule
            self._engine = Engine(
                opened,
                lambda version: self.weight_update_meta.with_version(version).path,
                lambda: recovered(config.recover),
                prompt,
            )
            if train_dataset is None:
                train_dataset = [{}] * (schedule.rollout_batch_size * schedule.max_steps)
            super().__init__(config, train_dataset)
        except BaseException as error:
            opened.__exit__(type(error), error, None)
            raise

    def _create_dataloader(self, *arguments: Any, **keys: Any) -> Rows:
        return Rows(super()._create_dataloader(*arguments, **keys))

    def _init_rollout(self, config: Any, is_eval: bool = False, lora_path: str | None = None) -> Engine | None:
        """April evaluates, by `evaluation.every`."""
        return None if is_eval else self._engine

    def train(self) -> None:
        """Raises ConfigError where AReaL takes another number of steps than the run."""
        steps = self.config.total_train_epochs * len(self.train_dataloader)
        steps = min(steps, self.config.total_train_steps or steps)
        most = self._engine.run.config.schedule.max_steps
        if steps != most:
            raise ConfigError(
                f"AReaL trains {steps} steps and the run {most}; set total_train_steps or total_train_epochs"
            )
        super().train(workflow=Workflow())


def recovered(recover: Any) -> tuple[int, Path]:
    """The step that AReaL would go on from, 0 without one, and the folder of its checkpoints."""
    place = recover.experiment_name, recover.trial_name, recover.fileroot
    info = Path(RecoverHandler.recover_info_path(*place))
    if recover.mode in ("disabled", "off"):
        return 0, info.parent
    try:
        return RecoverInfo.load(str(info)).last_step_info.global_step + 1, info.parent
    except (FileNotFoundError, InValidRecoverInfo):
        return 0, info.parent
