"""A real engine under the stopwatch, driven by the interface through which workers drive it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from april.config import Config, ConfigError
from april.config.checks import check_engine
from april.config.loading import validate
from april.config.overrides import parse_overrides, set_key
from april.simulate.calibrate import Timing
from april.wire.version import Version
from april.workers.engines import ENGINES
from april.workers.engines.base import Chunk, Engine, EngineError, Request
from april.workers.engines.devices import device_of
from april.workers.engines.folder_weights import load_folder_weights
from april.workers.process import make_engine

STEPS, SETTLE_STEPS = 128, 16
"""decode steps that are timed together, and those before them"""
PROMPT_TOKENS = 8


@dataclass
class Crowd:
    """The sequences that run, each of which is replaced when it ends."""

    random: np.random.Generator
    longest: int
    origins: dict[int, float] = field(default_factory=dict)
    """by request, its context less the steps that were over when it came"""
    steps: float = 0.0

    @property
    def context(self) -> float:
        """Tokens in the cache."""
        return sum(self.origins.values()) + len(self.origins) * self.steps


class EngineProbe:
    """Times an engine on which nothing else runs. `tensors`: its weights, by Hugging Face name; `clock`: seconds."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: int,
        slots: int,
        tensors: Mapping[str, torch.Tensor],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.engine, self.vocabulary, self.slots, self.tensors = engine, vocabulary, slots, tensors
        self.clock = clock
        self.longest_response = engine.max_context - PROMPT_TOKENS
        self._count = 0
        engine.load_weights(Version(0, 0), tensors)

    def time(self, running: int, longest: int) -> Timing:
        """Decode steps of `running` sequences in the midst of responses of 1 to `longest` tokens, each replaced by a
        new one when it ends; an update of the weights; the prefill."""
        crowd = Crowd(np.random.default_rng([running, longest]), longest)
        for _ in range(running):
            length = 1 + int((longest - 1) * np.sqrt(crowd.random.random()))  # a long one runs at more instants
            age = int(crowd.random.integers(length))
            self._submit(crowd, age, length - age)
        self._generate(crowd, SETTLE_STEPS * running)
        measured = self._generate(crowd, STEPS * running)
        began = self.clock()
        self.engine.load_weights(Version(0, self._count), self.tensors)
        pause_s, context = self.clock() - began, round(crowd.context)
        step_s = measured["decode_s"] / measured["steps"]
        prefill_s = max(0.0, self._generate(crowd, running)["decode_s"] - step_s)
        self.engine.cancel_all(list(crowd.origins))
        return Timing(running, **measured, pause_s=pause_s, context=context, prefill_s=prefill_s)

    def _submit(self, crowd: Crowd, age: int, left: int) -> None:
        self._count += 1
        tokens = crowd.random.integers(2, self.vocabulary, PROMPT_TOKENS + age).astype(np.int32)
        self.engine.submit(Request(self._count, tokens, left, seed=self._count))
        crowd.origins[self._count] = len(tokens) - crowd.steps

    def _generate(self, crowd: Crowd, tokens: int) -> dict[str, Any]:
        """Go on until there are so many more; fields of `Timing`."""
        engine, running, since = self.engine, len(crowd.origins), crowd.steps
        admissions, admitted, kv_steps = 0, 0, 0.0
        began, wanted = self.clock(), engine.generated_tokens + tokens
        while engine.generated_tokens < wanted:
            before = engine.generated_tokens
            ended = [chunk.id for chunk in self._step() if chunk.finish_reason]
            steps = (engine.generated_tokens - before) / running
            kv_steps += steps * crowd.context
            crowd.steps += steps
            for request in ended:
                del crowd.origins[request]
                self._submit(crowd, 0, int(crowd.random.integers(1, crowd.longest + 1)))
            admissions, admitted = admissions + bool(ended), admitted + len(ended)
        steps = crowd.steps - since
        return {
            "decode_s": self.clock() - began, "steps": steps, "kv": kv_steps / steps, "admissions": admissions,
            "admitted": admitted, "admitted_tokens": admitted * PROMPT_TOKENS,
        }  # fmt: skip

    def _step(self) -> list[Chunk]:
        """Raises EngineError where waiting for more tokens would have no end."""
        chunks = self.engine.step()
        if failures := self.engine.failures():
            raise EngineError(f"a request of the calibration has failed: {failures[0][1]}")
        if self.engine.version is None:
            raise EngineError("the server was lost while it was timed; see why in its log, and calibrate again")
        return chunks


def unhindered_s() -> float:
    """Seconds, but for those in which this thread could have run and the machine was busy with something else."""
    waited_ns = int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


def vocabulary_of(config: Config) -> int:
    if config.vocabulary is None:
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} has a config.json without vocab_size; give one"
        )
    return config.vocabulary


@contextmanager
def probe_of(model: Path, slots: int, overrides: list[str]) -> Iterator[tuple[EngineProbe, str]]:
    """The engine that a worker of a run with these keys would have, and its name. Raises ConfigError, also for what
    the engine refuses meanwhile."""
    tree = {"model": {"path": str(model)}, "data": {}, "worker": {"slots": slots}}
    for key, value in parse_overrides(overrides):
        set_key(tree, key, value)
    config = validate(tree)
    check_engine(config)
    if config.engine.pause == "in_place":
        raise ConfigError(
            "key 'engine.pause' = 'in_place' leaves no prefill to be timed after new weights; leave it out, and set "
            "weights.keep_kv = true in the scenario"
        )
    torch.set_num_threads(config.worker.threads)
    clock = unhindered_s if ENGINES.find(config.worker.engine).in_process else time.perf_counter
    try:
        with closing(make_engine(config, device_of(config), "calibrate")) as engine:
            tensors = load_folder_weights(model)
            yield EngineProbe(engine, vocabulary_of(config), slots, tensors, clock), config.worker.engine
    except EngineError as error:
        raise ConfigError(str(error)) from None
