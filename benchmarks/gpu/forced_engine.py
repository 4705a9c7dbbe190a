"""The torch engine with forced lengths: each sample ends at the length that a scenario gives it, whatever it says.

A length belongs to (group, sample) and to the run's seed, so that every schedule has the same ones, and so has the
simulator. The engine is built only when the file GATE is in the run's folder, which names the lengths: runs can be
started together and let go one after the other. It writes down when its slots had a sample in them.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from april.workers.engines.embedded.entry import TorchEntry

if TYPE_CHECKING:
    from april.workers.engines.embedded.engine import TorchEngine

GATE, WAITS, GAUGE = "gate.json", "engine.waits", "slots.jsonl"
"""Files in the run's folder: lengths, as keys of `LengthsSection`, with which the engine may begin; a sign that it
waits for them; and sums since its start, a line every NOTE_S."""
NOTE_S, POLL_S = 0.05, 0.02
GROUPS = 4096
"""More groups than a run opens."""


class Entry(TorchEntry):
    yields_cpu = False

    @classmethod
    def from_config(cls, config, device: str, name: str) -> "TorchEngine":
        import torch

        kind, gate = forced_class(), config.run_dir / GATE
        torch.zeros(1, device=device)  # what the device needs in each process takes seconds too
        (config.run_dir / WAITS).touch()
        while not gate.exists():
            time.sleep(POLL_S)
        engine = super().from_config(config, device, name)
        engine.__class__ = kind
        engine.force(orjson.loads(gate.read_bytes()), config)
        return engine


def forced_class() -> type:
    """The engine's class, made late: the entry is imported by processes that need no torch."""
    from april.broker.handlers.lease_holders import sample_seed
    from april.simulate.scenario import Lengths, LengthsSection
    from april.workers.engines.embedded.engine import TorchEngine

    class ForcedEngine(TorchEngine):
        def force(self, lengths: dict, config) -> None:
            drawn = Lengths(LengthsSection(**lengths), config.schedule.n_samples_per_prompt, config.seed)
            self.budget = config.sampling.max_response_tokens
            self.length_of = {
                sample_seed(config.seed, group, index): length
                for group in range(GROUPS)
                for index, length in enumerate(drawn.of(group))
            }
            self.file = (config.run_dir / GAUGE).open("wb", buffering=0)
            self.sums = {"busy_slot_s": 0.0, "running_s": 0.0, "step_s": 0.0, "steps": 0, "load_s": 0.0, "loads": 0}
            self.ended = self.noted = 0.0
            self.continues = False
            """Whether nothing but the worker's own loop lies between the last step and the next."""

        def submit(self, request) -> None:
            left = self.length_of[request.seed] - (self.budget - request.max_new_tokens)
            super().submit(replace(request, max_new_tokens=left, stop_token_ids=frozenset()))

        def step(self) -> list:
            began, before = time.time(), self.generated_tokens
            chunks = super().step()
            ended, running = time.time(), self.generated_tokens - before
            if running:
                took = ended - (self.ended if self.continues else began)
                self._add(busy_slot_s=running * took, running_s=took, step_s=ended - began, steps=1)
            self.ended, self.continues = ended, bool(running and self.live)
            return chunks

        def load_weights(self, version, tensors) -> None:
            began = time.time()
            super().load_weights(version, tensors)
            self._add(load_s=time.time() - began, loads=1)
            self.continues = False

        def _add(self, **more: float) -> None:
            for key, value in more.items():
                self.sums[key] += value
            now = time.time()
            if now >= self.noted + NOTE_S:
                self.noted = now
                line = self.sums | {"at": now, "tokens": self.generated_tokens}
                self.file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    return ForcedEngine
