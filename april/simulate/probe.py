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
        """Decode steps of `running` sequences of `context` random tokens, an update of the weights, the prefill."""
        ids = range(self._count, self._count + running)
        self._count = ids.stop
        for number in ids:
            tokens = self._random.integers(2, self.vocabulary, context).astype(np.int32)
            self.engine.submit(Request(number, tokens, SETTLE_STEPS + 4 * STEPS, seed=number))
        self._generate(SETTLE_STEPS * running)
        step_s = self._generate(STEPS * running) / STEPS
        began = self.clock()
        self.engine.load_weights(Version(0, ids.stop), self.tensors)
        pause_s = self.clock() - began
        prefill_s = self._generate(running) - step_s
        self.engine.cancel_all(ids)
        before = context + SETTLE_STEPS
        return Timing(running, running * (before + STEPS / 2), step_s, pause_s, running * (before + STEPS), prefill_s)

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
