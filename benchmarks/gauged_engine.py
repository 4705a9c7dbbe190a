"""The paced engine, which writes down how many of its slots have had a sample in them."""

import time

import orjson

from april.workers.engines.base import Chunk
from april.workers.engines.embedded.entry import PacedEntry
from april.workers.engines.embedded.paced import PacedEngine

GAUGE = "slots.jsonl"
"""File in the run's folder: sums since the worker's start, a line every NOTE_S."""
NOTE_S = 0.5


class GaugedEngine(PacedEngine):
    def gauge(self, path) -> None:
        self.file = path.open("wb", buffering=0)
        self.busy_slot_s, self.turns = 0.0, 0
        self.looked_at = self.noted_at = time.monotonic()

    def submit(self, request) -> None:
        super().submit(request)
        self.turns += 1

    def step(self) -> list[Chunk]:
        before = self.generated_tokens
        chunks = super().step()
        now, ran = time.monotonic(), self.generated_tokens - before
        self.busy_slot_s += ran * (now - self.looked_at)
        self.looked_at = now
        if now >= self.noted_at + NOTE_S:
            self.noted_at = now
            line = {"at": now, "busy_slot_s": self.busy_slot_s, "turns": self.turns}
            self.file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        return chunks


class Entry(PacedEntry):
    @classmethod
    def from_config(cls, config, device, name):
        engine = super().from_config(config, device, name)
        engine.__class__ = GaugedEngine
        engine.gauge(config.run_dir / GAUGE)
        return engine
