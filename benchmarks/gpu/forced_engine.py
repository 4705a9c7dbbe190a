"""The torch engine with forced lengths: each sample ends at the length that a scenario gives it, whatever it says.

A length belongs to (group, sample) and to the run's seed, so that every schedule has the same ones, and so has the
simulator. The engine is built only when the file GATE is in the run's folder, which names the lengths: runs can be
started together and let go one after the other. It writes down when its slots had a sample in them.

Before its first step it is where a run that has lasted is: its cache has grown, and decode steps of any number of rows
have run once.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import orjson

from april.workers.engines.embedded.entry import TorchEntry

if TYPE_CHECKING:
    from april.workers.engines.embedded.engine import TorchEngine

GATE, WAITS, GAUGE = "gate.json", "engine.waits", "slots.jsonl"
"""Files in the run's folder: lengths, as keys of `LengthsSection`, with which the engine may begin; a sign that it
waits for them; and sums since its start, a line every NOTE_S."""
NOTE_S, POLL_S = 0.05, 0.02
SUMS = (
    "busy_slot_s", "running_s", "step_s", "steps", "load_s", "loads",
    "quiet_s", "quiet_steps", "after_end_s", "after_ends", "finished",
)  # fmt: skip
"""Slot-seconds with a sample, seconds with one, seconds and number of decode steps, and of loads. Then the worker's own
loop while the device waited: seconds and number of loops after steps in which no sample ended, and after others, with
the number of those samples."""
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
    from april.workers.engines.base import Request
    from april.workers.engines.embedded.engine import TorchEngine

    class ForcedEngine(TorchEngine):
        def force(self, lengths: dict, config) -> None:
            drawn = Lengths(LengthsSection(**lengths), config.schedule.n_samples_per_prompt, config.seed)
            self.takes_turns = config.devices.turns
            self.budget = config.sampling.max_response_tokens
            self.length_of = {
                sample_seed(config.seed, group, index): length
                for group in range(GROUPS)
                for index, length in enumerate(drawn.of(group))
            }
            self.file = (config.run_dir / GAUGE).open("wb", buffering=0)
            self.sums: dict[str, float] = dict.fromkeys(SUMS, 0)
            self.ended = self.noted = 0.0
            self.continues = False
            """Whether nothing but the worker's own loop lies between the last step and the next."""
            self.finished = 0
            """Samples that ended in the last step."""

        def submit(self, request) -> None:
            left = self.length_of[request.seed] - (self.budget - request.max_new_tokens)
            super().submit(replace(request, max_new_tokens=left, stop_token_ids=frozenset()))

        def step(self) -> list:
            began, before = time.time(), self.generated_tokens
            if self.continues:
                loop_s = began - self.ended if self._device_waits() else 0.0
                if self.finished:
                    self._add(after_end_s=loop_s, after_ends=1, finished=self.finished)
                else:
                    self._add(quiet_s=loop_s, quiet_steps=1)
            chunks = super().step()
            ended, running = time.time(), self.generated_tokens - before
            if running:
                took = ended - (self.ended if self.continues else began)
                self._add(busy_slot_s=running * took, running_s=took, step_s=ended - began, steps=1)
            self.ended, self.continues = ended, bool(running and self.live)
            self.finished = sum(chunk.finish_reason is not None for chunk in chunks)
            return chunks

        def _device_waits(self) -> bool:
            """Whether no step is under way on the device, which then waits for the worker's loop."""
            ahead = self._ahead
            return ahead is None or ahead.copied is None or ahead.copied.query()

        def load_weights(self, version, tensors) -> None:
            is_first, began = self.version is None and self.sums["loads"] == 0, time.time()
            self._note()
            super().load_weights(version, tensors)
            self._add(load_s=time.time() - began, loads=1)
            self._note()
            self.continues = False
            if is_first and not self.takes_turns:  # each turn begins with an empty cache
                self._warm_up()

        def _warm_up(self) -> None:
            """Let the cache grow to its largest, and run steps with every number of rows."""
            if self._flat:
                self._cache._grow(self.kv_tokens)
            for row in range(self.slots):
                tokens = np.full(2, 2 + row % 50, np.int32)
                super().submit(Request(-1 - row, tokens, 1 + row, seed=row))
            while self.live:
                super().step()
            self._cache.clear()
            self.generated_tokens = 0

        def _add(self, **more: float) -> None:
            for key, value in more.items():
                self.sums[key] += value
            if time.time() >= self.noted + NOTE_S:
                self._note()

        def _note(self) -> None:
            now = time.time()
            if now > self.noted:
                self.noted = now
                line = self.sums | {"at": now, "tokens": self.generated_tokens}
                self.file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    return ForcedEngine
