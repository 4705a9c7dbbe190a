"""OpenRLHF's trainer on April's rollouts: its launcher, with April in place of its vLLM engines.

    python -m april.trainers.adapters.openrlhf --april.config my-run.toml --rollout.batch_size 128 ...

All other options are those of `openrlhf.cli.train_ppo_ray`. Its trainer sends the prompts of a step to one Ray actor,
which answers with a batch of the run; the actor model broadcasts its weights to the same Ray actor. One batch is one
step.
"""

import argparse
import asyncio
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from april import config as configuration
from april.config import Config, ConfigError
from april.learner.batch import TrainSample
from april.trainers import rollouts
from april.trainers.adapters.parts import (
    check_options,
    check_own_prompts,
    figures,
    full_groups,
    latest_step,
    read_tensors,
    step_folders,
    sync_folder,
)
from april.trainers.rollouts import Prompt, RolloutBatch, aio

# --- options ----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[type, Any]] = {
    "actor.model_name_or_path": (Path, None),
    "rollout.batch_size": (int, 1024),
    "rollout.vllm_generate_batch_size": (int, None),
    "rollout.n_samples_per_prompt": (int, 1),
    "rollout.temperature": (float, 1.0),
    "rollout.top_p": (float, 1.0),
    "rollout.max_new_tokens": (int, None),
    "vllm.num_engines": (int, None),
    "vllm.tensor_parallel_size": (int, 1),
    "vllm.sync_backend": (str, "nccl"),
    "algo.advantage.is_correction_level": (str, "off"),
    "ckpt.path": (str, "./ckpt/checkpoints_ppo_ray"),
    "eval.dataset": (str, None),
    "train.agent_func_path": (str, None),
}
"""(type, default) of each OpenRLHF option that the adapter checks, by option name."""
FLAGS = (
    "algo.dynamic_filtering_enable",
    "ckpt.load_enable",
    "train.async_enable",
    "train.colocate_all",
    "vllm.sync_with_ray",
)


def their_options(words: list[str]) -> dict[str, Any]:
    """Parse OpenRLHF's command line; returns the values of the options in OPTIONS and FLAGS by name, and ignores other
    options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, (kind, default) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", action="store_true")
    return vars(parser.parse_known_args(words)[0])


def check(config: Config, theirs: dict[str, Any]) -> None:
    """Check that one batch is one OpenRLHF step, and that both sides define log-probabilities alike. `theirs`: values
    of OpenRLHF's options (`their_options`). Raises ConfigError."""
    schedule, sampling = config.schedule, config.sampling
    groups = schedule.rollout_batch_size
    options: dict[str, tuple] = {
        "actor.model_name_or_path": (Path(config.model.named()),),
        "rollout.batch_size": (groups,),
        "rollout.vllm_generate_batch_size": (None, groups),
        "rollout.n_samples_per_prompt": (schedule.n_samples_per_prompt,),
        "rollout.temperature": (sampling.temperature,),
        "rollout.top_p": (1.0,),
        "rollout.max_new_tokens": (sampling.max_response_tokens,),
        "vllm.num_engines": (1,),
        "vllm.tensor_parallel_size": (1,),
        "algo.advantage.is_correction_level": ("token", "seq"),
        "eval.dataset": (None,),
        "train.agent_func_path": (None,),
        "train.async_enable": (False,),
        "train.colocate_all": (False,),
        "algo.dynamic_filtering_enable": (False,),
    }
    check_options(config, "OpenRLHF", {f"--{name}": (theirs[name], *fitting) for name, fitting in options.items()})
    check_own_prompts(config, "OpenRLHF")


# --- trainer ----------------------------------------------------------------------------------------------------------

TRAINER = "openrlhf.cli.train_ppo_ray"
GATHER_TIMEOUT_S = 120.0
"""Seconds after which a step fails if OpenRLHF, which sends its prompts concurrently, has not sent all of them."""
SPARE_CALLS = 64
"""Calls that the Ray actor can serve concurrently in addition to one per prompt of a step."""
LATEST_FILE = "latest"
STEP_PREFIX = "global_step"


@dataclass
class PendingPrompt:
    """A prompt that OpenRLHF has sent, and whose group of responses the run has not delivered yet."""

    prompt: str
    label: str
    tokenizer: Any
    response: "asyncio.Future[list[dict[str, Any]]]"


class OpenRlhfEngine:
    """The interface of OpenRLHF's `RolloutRayActor`, implemented by a run; an asyncio Ray actor."""

    def __init__(self, connect: Callable[[], aio.AsyncRollouts], checkpoints: str):
        """`connect`: makes the connection to the run; `checkpoints`: folder of the actor model's checkpoints."""
        self.run, self.checkpoints = connect(), Path(checkpoints)
        self.batch: RolloutBatch | None = None
        """The batch on which OpenRLHF is training; None if there is none."""
        self._pending: list[PendingPrompt] = []
        self._received: dict[str, Tensor] = {}
        self._has_weights = False
        """Whether any weights have been published to the run yet."""

    async def start(self) -> None:
        await self.run.__aenter__()
        self._durable = self.run.step

    # --- rollouts -----------------------------------------------------------------------------------------------

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """The responses of one group of the next batch, once all prompts of the step have arrived. With `data.source` =
        "submitted" the group belongs to this prompt; otherwise to a prompt that April has drawn, whose text and label
        are returned. `hf_tokenizer` encodes the prompt. The other parameters have no effect: April's configuration says
        how it samples.

        Raises RuntimeError for `images`, if the run is over before OpenRLHF is, or fewer prompts arrive than a batch
        has groups."""
        if images:
            raise RuntimeError("April takes text alone; leave out --data.max_images_per_prompt")
        loop = asyncio.get_running_loop()
        pending = PendingPrompt(prompt, label, hf_tokenizer, loop.create_future())
        if not self._pending:
            self._timer = loop.call_later(GATHER_TIMEOUT_S, self._refuse_incomplete)
        self._pending.append(pending)
        if len(self._pending) == self.run.config.schedule.rollout_batch_size:
            self._timer.cancel()
            complete, self._pending = self._pending, []
            self._serving = asyncio.create_task(self._serve(complete))
        return await pending.response

    def get_num_unfinished_requests(self) -> int:
        return len(self._pending)

    def _refuse_incomplete(self) -> None:
        incomplete, self._pending = self._pending, []
        for request in incomplete:
            request.response.set_exception(
                RuntimeError(
                    f"{len(incomplete)} prompts came and no more, of which a batch has "
                    f"{self.run.config.schedule.rollout_batch_size}; give OpenRLHF a multiple of --rollout.batch_size"
                )
            )

    async def _serve(self, pending: list[PendingPrompt]) -> None:
        try:
            responses = await self._groups(pending)
        except Exception as error:
            for request in pending:
                request.response.set_exception(error)
            return
        for request, group in zip(pending, responses, strict=True):
            request.response.set_result(group)

    async def _groups(self, pending: list[PendingPrompt]) -> list[list[dict[str, Any]]]:
        run, config = self.run, self.run.config
        if run.step >= config.schedule.max_steps:
            raise RuntimeError(f"the run is over after {run.step} batches; raise schedule.max_steps")
        if not self._has_weights:
            await run.publish(read_tensors(Path(config.model.path)))
            self._has_weights = True
        await self._report_checkpoint()
        submits = config.data.source == "submitted"
        if submits:
            prompts = [
                Prompt(encode(request.tokenizer, request.prompt), str(request.label or "")) for request in pending
            ]
            await run.submit(prompts, first=run.step * len(pending))
        self.batch = await run.take()
        assert self.batch, "the run has more batches"
        responses = []
        for request, group in zip(pending, full_groups(self.batch, config.schedule.n_samples_per_prompt), strict=True):
            drawn = group[0].tokens[: group[0].prompt_tokens]
            origin = {
                "prompt": request.prompt if submits else request.tokenizer.decode(drawn),
                "label": request.label if submits else "",
            }
            responses.append([origin | to_response(sample) for sample in group])
        return responses

    # --- weights ------------------------------------------------------------------------------------------------

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
    ) -> None:
        """Join, as one rank, the process group over which OpenRLHF's actor model broadcasts its weights: for OpenRLHF
        this is its only inference engine."""
        if use_ray:
            from ray.util import collective

            join = partial(collective.init_collective_group, world_size, rank_offset, backend, group_name)
            await asyncio.to_thread(join)
            self._receive: Callable[[Tensor], Any] = partial(collective.broadcast, src_rank=0, group_name=group_name)
        else:
            from openrlhf.utils.distributed_util import stateless_init_process_group

            device = torch.cuda.current_device()
            group = await asyncio.to_thread(
                stateless_init_process_group, master_address, master_port, rank_offset, world_size, device
            )
            self._receive = lambda tensor: group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    async def update_weight(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Receive one weight tensor from rank 0; `empty_cache` marks the last tensor, after which the weights are
        published."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        await asyncio.to_thread(self._receive, tensor)
        self._received[name] = tensor.cpu()
        if empty_cache:
            weights, self._received = self._received, {}
            await self._publish(weights)

    async def reset_prefix_cache(self) -> None:
        """Does nothing: April's workers reset their cache with every version."""

    async def _publish(self, weights: dict[str, Tensor]) -> None:
        """Publish the weights trained on the last batch to April's workers; after the last step the run ends."""
        run = self.run
        if self.batch:
            await run.consumed(self.batch, figures(self.batch))
        await run.publish(weights)
        self._has_weights = True
        if run.step >= run.config.schedule.max_steps:
            await self._report_checkpoint()
            await run.take()
            await run.__aexit__(None, None, None)

    async def _report_checkpoint(self) -> None:
        """Report OpenRLHF's newest checkpoint as durable once it is synced to disk."""
        saved = newest_step(self.checkpoints)
        if self._durable < saved <= self.run.step:
            folders = step_folders(self.checkpoints, STEP_PREFIX)
            sync_folder(folders[saved])
            await self.run.durable(saved, oldest=min(folders))
            self._durable = saved


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of the prompt, as OpenRLHF's own executor encodes it."""
    return tokenizer(text=prompt, add_special_tokens=False)["input_ids"]


def to_response(sample: TrainSample) -> dict[str, Any]:
    """One sample as the dictionary that OpenRLHF expects of its inference engine: the fields that it reads."""
    first = sample.prompt_tokens
    return {
        "images": None,
        "mm_train_inputs": None,
        "reward": sample.reward,
        "scores": sample.reward,
        "observation_tokens": sample.tokens.tolist(),
        "action_ranges": [(first + start, first + end) for start, end, _ in sample.segments],
        "rollout_log_probs": [0.0] * first + sample.logprobs.tolist(),
        "truncated": sample.finish_reason == "length",
        "extra_logs": {},
    }


def newest_step(checkpoints: Path) -> int:
    """Policy step of the newest checkpoint; 0 without one."""
    return latest_step(checkpoints / LATEST_FILE, STEP_PREFIX) or 0


# --- launcher ---------------------------------------------------------------------------------------------------------


def own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--april.config", required=True, metavar="FILE", help="TOML file of the run")
    parser.add_argument("--april.run", default=rollouts.LOCAL, help="tcp://HOST:PORT of a broker that runs already")
    return parser


def create_engines(path: str, address: str, theirs: dict[str, Any], *_: Any, **__: Any) -> list[Any]:
    """Replacement of OpenRLHF's `create_vllm_engines`: starts one Ray actor, with a GPU only if it receives weights by
    NCCL. `path`: configuration of the run; `address`: that of a running broker, or "local" to start one; `theirs`:
    values of OpenRLHF's options (`their_options`). OpenRLHF's own arguments are ignored."""
    import ray

    checkpoints = str(Path(theirs["ckpt.path"], "_actor").absolute())
    step = newest_step(Path(checkpoints)) if theirs["ckpt.load_enable"] else 0
    through_host = theirs["vllm.sync_with_ray"] and theirs["vllm.sync_backend"] != "nccl"
    at_once = theirs["rollout.batch_size"] + SPARE_CALLS
    actor = ray.remote(OpenRlhfEngine).options(num_cpus=1, num_gpus=0 if through_host else 1, max_concurrency=at_once)
    engine = actor.remote(partial(aio.connect, path, step, address), checkpoints)
    ray.get(engine.start.remote())
    return [engine]


def main(words: Sequence[str]) -> None:
    options, rest = own_options().parse_known_args(words)
    path, address = (vars(options)[f"april.{name}"] for name in ("config", "run"))
    theirs = their_options(rest)
    check(configuration.load(path), theirs)
    import openrlhf.trainer.ray

    openrlhf.trainer.ray.create_vllm_engines = partial(create_engines, str(Path(path).absolute()), address, theirs)
    # With an agent function OpenRLHF needs no reward model of its own.
    sys.argv[1:] = [*rest, "--train.agent_func_path", __file__]
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
