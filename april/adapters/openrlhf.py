"""OpenRLHF's trainer on April's rollouts: its launcher, with April in the place of its vLLM engines.

    python -m april.adapters.openrlhf --april.config my-run.toml --rollout.batch_size 128 ...

All other options are those of `openrlhf.cli.train_ppo_ray`. Its trainer sends a step's prompts to one Ray actor, which
answers with a batch of the run; its actor model broadcasts its weights to the same. One batch is one step.
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

import numpy as np
import torch
from torch import Tensor

from april import config as configuration
from april import rollouts
from april.adapters.openrlhf_options import check, their_options
from april.adapters.parts import filled, sync_all, tensors_in
from april.config import ConfigError
from april.learner.batch import TrainSample
from april.rollouts import Prompt, RolloutBatch, aio

TRAINER = "openrlhf.cli.train_ppo_ray"
GATHER_S = 120.0
"""in which all prompts of a step arrive: OpenRLHF sends them at once"""
OTHER_CALLS = 64
"""that the actor takes beside those of a step's prompts"""
NEWEST = "latest"
TAG = "global_step"


@dataclass
class Asked:
    """A prompt of OpenRLHF's, as text, whose samples are awaited."""

    prompt: str
    label: str
    tokenizer: Any
    answer: "asyncio.Future[list[dict[str, Any]]]"


class Engine:
    """What OpenRLHF's trainer calls of a `RolloutRayActor`, on a run; a Ray actor of one asyncio loop."""

    def __init__(self, connect: Callable[[], aio.AsyncRollouts], checkpoints: str):
        """`checkpoints`: OpenRLHF's folder of the actor's."""
        self.run, self.checkpoints = connect(), Path(checkpoints)
        self.batch: RolloutBatch | None = None
        """in training"""
        self._asked: list[Asked] = []
        self._arriving: dict[str, Tensor] = {}
        self._brought = False
        """whether the run has been given weights"""

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
        """A group, once the step's other prompts are here. With `data.source` = "submitted" it is of this prompt;
        otherwise of one of the run's own, and what belongs to the prompt is that one's.

        Raises RuntimeError where the run is over before OpenRLHF is, or fewer prompts come than a batch has groups.
        """
        if images:
            raise RuntimeError("April takes text alone; leave out --data.max_images_per_prompt")
        loop = asyncio.get_running_loop()
        asked = Asked(prompt, label, hf_tokenizer, loop.create_future())
        if not self._asked:
            self._late = loop.call_later(GATHER_S, self._refuse_part)
        self._asked.append(asked)
        if len(self._asked) == self.run.config.schedule.rollout_batch_size:
            self._late.cancel()
            whole, self._asked = self._asked, []
            self._serving = asyncio.create_task(self._serve(whole))
        return await asked.answer

    def get_num_unfinished_requests(self) -> int:
        return len(self._asked)

    def _refuse_part(self) -> None:
        part, self._asked = self._asked, []
        for one in part:
            one.answer.set_exception(
                RuntimeError(
                    f"{len(part)} prompts came and no more, of which a batch has "
                    f"{self.run.config.schedule.rollout_batch_size}; give OpenRLHF a multiple of --rollout.batch_size"
                )
            )

    async def _serve(self, asked: list[Asked]) -> None:
        try:
            answers = await self._groups(asked)
        except Exception as error:
            for one in asked:
                one.answer.set_exception(error)
            return
        for one, group in zip(asked, answers, strict=True):
            one.answer.set_result(group)

    async def _groups(self, asked: list[Asked]) -> list[list[dict[str, Any]]]:
        run, config = self.run, self.run.config
        if run.step >= config.schedule.max_steps:
            raise RuntimeError(f"the run is over after {run.step} batches; raise schedule.max_steps")
        if not self._brought:
            await run.publish(tensors_in(Path(config.model.path)))
            self._brought = True
        await self._tell_checkpoint()
        own = config.data.source != "submitted"
        if not own:
            prompts = [Prompt(encoded(one.tokenizer, one.prompt), str(one.label or "")) for one in asked]
            await run.submit(prompts, first=run.step * len(asked))
        self.batch = await run.take()
        assert self.batch, "the run has more batches"
        groups, size = self.batch.groups, config.schedule.n_samples_per_prompt
        if not own:
            groups = [groups[place] for place in np.argsort(self.batch.prompts)]
        answers = []
        for one, group in zip(asked, groups, strict=True):
            prompt = one.tokenizer.decode(group[0].tokens[: group[0].prompt_tokens]) if own else one.prompt
            origin = {"prompt": prompt, "label": "" if own else one.label}
            answers.append([origin | described(sample) for sample in filled(group, size)])
        return answers

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
        """As one engine of one rank has it."""
        if use_ray:
            from ray.util import collective

            meet = partial(collective.init_collective_group, world_size, rank_offset, backend, group_name)
            await asyncio.to_thread(meet)
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
        """Rank 0 broadcasts it; `empty_cache` is said of the last."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        await asyncio.to_thread(self._receive, tensor)
        self._arriving[name] = tensor.cpu()
        if empty_cache:
            weights, self._arriving = self._arriving, {}
            await self._bring(weights)

    async def reset_prefix_cache(self) -> None:
        """April's workers do that with every new version."""

    async def _bring(self, weights: dict[str, Tensor]) -> None:
        """They contain the last batch; those of the last step end the run."""
        run = self.run
        if self.batch:
            await run.consumed(self.batch, {"reward": self.batch.rewards.mean().item()})
        await run.publish(weights)
        self._brought = True
        if run.step >= run.config.schedule.max_steps:
            await self._tell_checkpoint()
            await run.take()
            await run.__aexit__(None, None, None)

    async def _tell_checkpoint(self) -> None:
        """OpenRLHF's newest checkpoint is durable once it is on disk."""
        saved = newest_step(self.checkpoints)
        if self._durable < saved <= self.run.step:
            sync_all(self.checkpoints / f"{TAG}{saved}")
            kept = [step_of(folder.name) for folder in self.checkpoints.glob(f"{TAG}[0-9]*")]
            await self.run.durable(saved, oldest=min(kept))
            self._durable = saved


def encoded(tokenizer: Any, prompt: str) -> list[int]:
    """As OpenRLHF's executor does it."""
    return tokenizer(text=prompt, add_special_tokens=False)["input_ids"]


def described(sample: TrainSample) -> dict[str, Any]:
    """What OpenRLHF reads of a response."""
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
    """Of the checkpoint that OpenRLHF would go on from; 0 without one."""
    path = checkpoints / NEWEST
    return step_of(path.read_text().strip()) if path.is_file() else 0


def step_of(tag: str) -> int:
    return int(tag.removeprefix(TAG))


# --- the launcher -----------------------------------------------------------------------------------------------


def own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--april.config", required=True, metavar="FILE", help="TOML file of the run")
    parser.add_argument("--april.run", default=rollouts.LOCAL, help="tcp://HOST:PORT of a broker that runs already")
    return parser


def create_engines(path: str, address: str, theirs: dict[str, Any], *_: Any, **__: Any) -> list[Any]:
    """In the place of `create_vllm_engines`: one Ray actor. It needs an accelerator to receive by NCCL alone."""
    import ray

    checkpoints = str(Path(theirs["ckpt.path"], "_actor").absolute())
    step = newest_step(Path(checkpoints)) if theirs["ckpt.load_enable"] else 0
    through_host = theirs["vllm.sync_with_ray"] and theirs["vllm.sync_backend"] != "nccl"
    at_once = theirs["rollout.batch_size"] + OTHER_CALLS
    actor = ray.remote(Engine).options(num_cpus=1, num_gpus=0 if through_host else 1, max_concurrency=at_once)
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
    # OpenRLHF asks for no reward model of its own where an agent says the rewards.
    sys.argv[1:] = [*rest, "--train.agent_func_path", __file__]
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
