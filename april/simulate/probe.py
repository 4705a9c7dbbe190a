"""Times a real engine for `calibrate`, through the interface that workers use."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from april.config import Config, ConfigError
from april.config.checks import check_engine
from april.config.loading import parse_overrides, set_key, validate
from april.simulate.calibrate import Timing
from april.util.errors import refuse
from april.util.files import weight_files
from april.wire.message import Version
from april.workers.engines import ENGINES
from april.workers.engines.base import Chunk, Engine, EngineError, Request
from april.workers.engines.entry import device_of
from april.workers.process import make_engine

STEPS, SETTLE_STEPS = 128, 16
"""Number of decode steps per timing, and of decode steps before the timing begins."""
PROMPT_TOKENS = 8


@dataclass
class SequencePool:
    """The running sequences of an engine that is timed; each is replaced when it ends."""

    random: np.random.Generator
    longest: int
    """Length of the longest response (tokens); responses have 1 to so many tokens."""
    origins: dict[int, float] = field(default_factory=dict)
    """Origin of each request, by its id: context tokens of the sequence at its admission, minus the pool's `steps` at
    that time."""
    steps: float = 0.0
    """Number of decode steps that the engine has made with these sequences so far."""

    @property
    def context(self) -> float:
        """Number of tokens that all running sequences together have in the KV cache now."""
        return sum(self.origins.values()) + len(self.origins) * self.steps


class EngineProbe:
    """Times an otherwise idle engine. `tensors`: its weights by Hugging Face name; `clock`: returns seconds."""

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
        self._requests = 0
        engine.load_weights(Version(0, 0), tensors)

    def time(self, running: int, longest: int) -> Timing:
        """Measure the durations of decode steps of `running` sequences at random positions of responses of 1 to
        `longest` tokens, then of a weight update, then of the prefill after it. A sequence that ends is replaced."""
        pool = SequencePool(np.random.default_rng([running, longest]), longest)
        for _ in range(running):
            length = 1 + int((longest - 1) * np.sqrt(pool.random.random()))  # a long one runs at more instants
            age = int(pool.random.integers(length))
            self._submit(pool, age, length - age)
        self._generate(pool, SETTLE_STEPS * running)
        measured = self._generate(pool, STEPS * running)
        began = self.clock()
        self.engine.load_weights(Version(0, self._requests), self.tensors)
        pause_s, context = self.clock() - began, round(pool.context)
        step_s = measured["decode_s"] / measured["steps"]
        prefill_s = max(0.0, self._generate(pool, running)["decode_s"] - step_s)
        self.engine.cancel_all(list(pool.origins))
        return Timing(running, **measured, pause_s=pause_s, context=context, prefill_s=prefill_s)

    def _submit(self, pool: SequencePool, age: int, response_tokens: int) -> None:
        self._requests += 1
        tokens = pool.random.integers(2, self.vocabulary, PROMPT_TOKENS + age).astype(np.int32)
        self.engine.submit(Request(self._requests, tokens, response_tokens, seed=self._requests))
        pool.origins[self._requests] = len(tokens) - pool.steps

    def _generate(self, pool: SequencePool, tokens: int) -> dict[str, Any]:
        """Generate at least `tokens` more tokens; returns values for the fields of `Timing` about decode steps and
        admissions."""
        engine, running, first_step = self.engine, len(pool.origins), pool.steps
        admissions, admitted, kv_steps = 0, 0, 0.0
        began, target = self.clock(), engine.generated_tokens + tokens
        while engine.generated_tokens < target:
            before = engine.generated_tokens
            ended = [chunk.id for chunk in self._step() if chunk.finish_reason]
            steps = (engine.generated_tokens - before) / running
            kv_steps += steps * pool.context
            pool.steps += steps
            for request in ended:
                del pool.origins[request]
                self._submit(pool, 0, int(pool.random.integers(1, pool.longest + 1)))
            admissions, admitted = admissions + bool(ended), admitted + len(ended)
        steps = pool.steps - first_step
        return {
            "decode_s": self.clock() - began, "steps": steps, "kv": kv_steps / steps, "admissions": admissions,
            "admitted": admitted, "admitted_tokens": admitted * PROMPT_TOKENS,
        }  # fmt: skip

    def _step(self) -> list[Chunk]:
        """One step of the engine. Raises EngineError if a request has failed or the server is lost."""
        chunks = self.engine.step()
        if failures := self.engine.failures():
            raise EngineError(f"a request of the calibration has failed: {failures[0][1]}")
        if self.engine.version is None:
            raise EngineError("the server was lost while it was timed; see why in its log, and calibrate again")
        return chunks


def unpreempted_s() -> float:
    """Clock that stands still while this thread is runnable but waits for a CPU (seconds)."""
    waited_ns = int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


def vocabulary_of(config: Config) -> int:
    if config.vocabulary is None:
        refuse("model.path", config.model.path, "has a config.json without vocab_size", "give one")
    return config.vocabulary


@contextmanager
def probe_of(model: Path, slots: int, overrides: list[str]) -> Iterator[tuple[EngineProbe, str]]:
    """Context manager: (probe, engine name) of the engine that a worker with so many `slots` would make for the folder
    `model`. `overrides`: further configuration keys, as words of a command line (KEY=VALUE). Raises ConfigError for a
    configuration that does not fit, and in place of an EngineError inside the block."""
    tree = {"model": {"path": str(model)}, "data": {}, "worker": {"slots": slots}}
    for key, value in parse_overrides(overrides):
        set_key(tree, key, value)
    config = validate(tree)
    check_engine(config)
    if config.engine.pause == "in_place":
        refuse(
            "engine.pause",
            "in_place",
            "leaves no prefill to be timed after new weights",
            "leave it out, and set weights.keep_kv = true in the scenario",
        )
    torch.set_num_threads(config.worker.threads)
    clock = unpreempted_s if ENGINES.find(config.worker.engine).in_process else time.perf_counter
    try:
        with closing(make_engine(config, device_of(config), "calibrate")) as engine:
            tensors = load_folder_weights(model)
            yield EngineProbe(engine, vocabulary_of(config), slots, tensors, clock), config.worker.engine
    except EngineError as error:
        raise ConfigError(str(error)) from None


def load_folder_weights(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by name. Raises EngineError if there is none."""
    files = weight_files(Path(folder))
    if not files:
        raise EngineError(f"{folder} holds no .safetensors file; save the model with save_pretrained")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
