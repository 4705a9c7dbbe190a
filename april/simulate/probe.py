"""A real engine under the stopwatch, driven by the interface through which workers drive it."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from april.config.loading import validate
from april.config.overrides import parse_overrides, set_key
from april.simulate.calibrate import Timing
from april.version import Version
from april.workers.engines.base import Engine, Request
from april.workers.engines.torch_engine import load_folder_weights
from april.workers.process import make_engine

STEPS = 32
"""decode steps timed together, as many as an engine that streams in bunches has tokens in one"""
SETTLE_STEPS = 16
"""that sequences take on average until all of them run"""


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
        self.longest_context = engine.max_context - SETTLE_STEPS - 4 * STEPS
        self._random = np.random.default_rng(0)
        self._count = 0
        engine.load_weights(Version(0, 0), tensors)

    def time(self, running: int, context: int) -> Timing:
        """Decode steps of `running` sequences of `context` random tokens, the same while others come and go, an update
        of the weights, the prefill."""
        ids = [self._submit(context, SETTLE_STEPS + 4 * STEPS) for _ in range(running)]
        self._generate(SETTLE_STEPS * running)
        step_s = self._generate(STEPS * running) / STEPS
        admit_s = self._time_admissions(running, step_s) if running < self.slots else None
        began = self.clock()
        self.engine.load_weights(Version(0, self._count), self.tensors)
        pause_s = self.clock() - began
        prefill_s = self._generate(running) - step_s
        self.engine.cancel_all(ids)
        before = context + SETTLE_STEPS
        computed = before + STEPS * (1 if admit_s is None else 2)
        return Timing(
            running, running * (before + STEPS / 2), step_s, admit_s, pause_s, running * computed, prefill_s
        )  # fmt: skip

    def _submit(self, context: int, response: int) -> int:
        self._count += 1
        tokens = self._random.integers(2, self.vocabulary, context).astype(np.int32)
        self.engine.submit(Request(self._count, tokens, response, seed=self._count))
        return self._count

    def _time_admissions(self, running: int, step_s: float) -> float:
        """What a short request costs those that run beside it, one coming when the last has gone."""
        admitted, began, wanted = 0, self.clock(), self.engine.generated_tokens + STEPS * running
        while self.engine.generated_tokens < wanted:
            if self.engine.live == running:
                self._submit(1, 1)
                admitted += 1
            self.engine.step()
        return max(0.0, self.clock() - began - STEPS * step_s) / admitted

    def _generate(self, tokens: int) -> float:
        """Go on until there are so many more; the seconds that it takes."""
        began, wanted = self.clock(), self.engine.generated_tokens + tokens
        while self.engine.generated_tokens < wanted:
            self.engine.step()
        return self.clock() - began


def unhindered_s() -> float:
    """Seconds, but for those in which this thread could have run and the machine was busy with something else."""
    waited_ns = int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


def make_probe(model: Path, slots: int, overrides: list[str]) -> tuple[EngineProbe, str]:
    """The engine that a worker of a run with these keys would have, and its name. Raises ConfigError."""
    tree = {"model": {"path": str(model)}, "data": {}, "worker": {"slots": slots}}
    for key, value in parse_overrides(overrides):
        set_key(tree, key, value)
    config = validate(tree)
    torch.set_num_threads(config.worker.threads)
    device = config.worker.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(config, device, "calibrate")
    clock = unhindered_s if config.worker.engine == "torch" else time.perf_counter
    return EngineProbe(engine, config.vocabulary, slots, load_folder_weights(model), clock), config.worker.engine
