"""Seconds of an adapter in a step: its calls on batches that are there, before workers that take weights at once.

    python benchmarks/adapter_times.py NAME CONFIG TOKENS

TOKENS: of a batch, all responses equally long. Prints a list of JSON, an entry a step.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from april import config as configuration
from april.config import Config
from april.learner.batch import TrainingBatch, TrainSample
from april.trainers.rollouts.aio import AsyncRollouts
from april.trainers.rollouts.run import Rollouts
from april.wire.message import Version

STEPS = 6
"""The first is a rehearsal."""
PROMPT_TOKENS = 20


class InstantSource:
    """A broker and workers in memory that never let one wait."""

    def __init__(self, config: Config, tokens: int):
        self.schedule = config.schedule
        length = tokens // (self.schedule.rollout_batch_size * self.schedule.n_samples_per_prompt)
        ids, segments = np.full(PROMPT_TOKENS + length, 3, np.int32), ((0, length, Version(0, 0)),)
        self.sample = TrainSample(ids, PROMPT_TOKENS, np.zeros(length, np.float32), 1.0, segments)
        self.extras: list[bytes] = []

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        return 0, 0

    def fetch(self, step: int) -> TrainingBatch:
        first = step * self.schedule.rollout_batch_size
        groups = [[self.sample] * self.schedule.n_samples_per_prompt] * self.schedule.rollout_batch_size
        return TrainingBatch(step, groups, list(enumerate(self.extras))[first : first + len(groups)])

    def submit(self, first: int, prompts: list, ids: np.ndarray) -> int:
        self.extras[first:] = [prompt.extra for prompt in prompts]
        return len(self.extras)

    def publish(self, *_) -> dict:
        return {}

    def alive(self) -> None: ...

    def consumed(self, *_) -> None: ...

    def durable(self, *_) -> None: ...


def of_trl(config: Config, tokens: int) -> Callable[[], None]:
    from april.trainers.adapters.trl import TrlRollouts, WeightsToApril

    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    trainer = SimpleNamespace(model=model.train(), accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    source = InstantSource(config, tokens)
    rollouts = TrlRollouts(Rollouts(config, 0, source, source), None)
    rows = [""] * config.schedule.rollout_batch_size * config.schedule.n_samples_per_prompt

    def step() -> None:
        WeightsToApril(rollouts.run, trainer).sync_weights()
        rollouts.generate(rows, trainer)

    return step


def of_slime(config: Config, tokens: int) -> Callable[[], None]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support import slime_types

    slime_types.install(pytest.MonkeyPatch())
    from april.trainers.adapters.slime import SlimeRollouts

    folder = Path(tempfile.mkdtemp(), "weight_v000001")
    folder.mkdir()
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    save_file({name: tensor.clone() for name, tensor in model.named_parameters()}, folder / "model.safetensors")
    args = SimpleNamespace(update_weight_disk_dir=str(folder.parent), save=None, reward_key=None)
    source, prompts = InstantSource(config, tokens), slime_types.Source(config.schedule.n_samples_per_prompt)
    owner = SlimeRollouts(args, Rollouts(config, 0, source, source))
    return lambda: owner.generate(owner.run.step, prompts)


def of_openrlhf(config: Config, tokens: int) -> Callable[[], None]:
    from april.trainers.adapters.openrlhf import OpenRlhfEngine

    model, tokenizer = (auto.from_pretrained(config.model.path) for auto in (AutoModelForCausalLM, AutoTokenizer))
    source, loop = InstantSource(config, tokens), asyncio.new_event_loop()
    engine = OpenRlhfEngine(lambda: AsyncRollouts(lambda: Rollouts(config, 0, source, source)), "none")
    loop.run_until_complete(engine.start())
    engine._receive = lambda tensor: None
    weights = [(name, tensor.dtype, tensor.shape) for name, tensor in model.named_parameters()]

    async def step() -> None:
        rows = range(config.schedule.rollout_batch_size)
        await asyncio.gather(*(engine.generate_responses(str(row), "", None, 0, tokenizer) for row in rows))
        for name, dtype, shape in weights:
            await engine.update_weight(name, dtype, shape, empty_cache=name == weights[-1][0])

    return lambda: loop.run_until_complete(step())


def of_areal(config: Config, tokens: int) -> Callable[[], None]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support import areal_types

    areal_types.install(pytest.MonkeyPatch())
    from april.trainers.adapters.areal import ArealEngine, CountingLoader

    folder = Path(tempfile.mkdtemp())
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    source, size = InstantSource(config, tokens), config.schedule.rollout_batch_size
    engine = ArealEngine(
        Rollouts(config, 0, source, source), lambda version: str(folder / str(version)), lambda: (0, folder)
    )
    rows = CountingLoader(areal_types.Loader([{"messages": [3] * PROMPT_TOKENS}] * size, size))
    for version in range(1, STEPS + 1):  # AReaL's actor has left them
        (folder / str(version)).mkdir()
        save_file(weights, folder / str(version) / "model.safetensors")

    def step() -> None:
        engine.prepare_batch(rows)
        engine.set_version(engine.run.step)

    return step


ADAPTERS = {"trl": of_trl, "slime": of_slime, "openrlhf": of_openrlhf, "areal": of_areal}
SUBMITTED = ["--data.source", "submitted"]
WITHOUT_END = ["--schedule.max_steps", "1000"]


def main(name: str, path: str, tokens: int) -> None:
    config = configuration.load(path, [*WITHOUT_END, *([] if name == "trl" else SUBMITTED)])
    step = ADAPTERS[name](config, tokens)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(orjson.dumps(seconds[1:]).decode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
