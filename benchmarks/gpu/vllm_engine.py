"""The vLLM engine with forced lengths: each sample ends at the length that a scenario gives it, whatever it says.

As `forced_engine`, on a server that others keep: runs can be started together and let go one after the other. It writes
down how many tokens have come, and how many requests are in the server.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from april.workers.engines.vllm.entry import VLLMEntry

if TYPE_CHECKING:
    from april.workers.engines.sglang.fleet import SGLangFleet

GATE, WAITS, GAUGE = "gate.json", "engine.waits", "tokens.jsonl"
"""Files in the run's folder: lengths, as keys of `LengthsSection`, with which the engine may begin; a sign that it
waits for them; and sums since its start, a line every NOTE_S."""
NOTE_S, POLL_S = 0.05, 0.02
GROUPS = 4096
"""More groups than a run opens."""


class Entry(VLLMEntry):
    @classmethod
    def from_config(cls, config, device: str, name: str) -> "SGLangFleet":
        kind, gate = forced_class(), config.run_dir / GATE
        (config.run_dir / WAITS).touch()
        while not gate.exists():
            time.sleep(POLL_S)
        engine = super().from_config(config, device, name)
        engine.__class__ = kind
        engine.force(orjson.loads(gate.read_bytes()), config)
        return engine


def lengths_of(lengths: dict, samples: int, seed: int, groups: int = GROUPS) -> list[list[int]]:
    """Response lengths by group and sample; those of a run with this seed and so many samples per prompt."""
    from april.simulate.scenario import Lengths, LengthsSection

    drawn = Lengths(LengthsSection(**lengths), samples, seed)
    return [list(drawn.of(group)) for group in range(groups)]


def forced_class() -> type:
    """The engine's class, made late: the entry is imported by processes that need no torch."""
    from april.broker.handlers.lease_holders import sample_seed
    from april.workers.engines.sglang.fleet import SGLangFleet
    from april.workers.engines.vllm import engine  # noqa: F401  imported before the gate opens

    class ForcedFleet(SGLangFleet):
        def force(self, lengths: dict, config) -> None:
            drawn = lengths_of(lengths, config.schedule.n_samples_per_prompt, config.seed)
            self.budget = config.sampling.max_response_tokens
            self.length_of = {
                sample_seed(config.seed, group, index): length
                for group, each in enumerate(drawn)
                for index, length in enumerate(each)
            }
            self.file = (config.run_dir / GAUGE).open("wb", buffering=0)
            self.busy_slot_s, self.ended, self.noted = 0.0, time.time(), 0.0

        def submit(self, request) -> None:
            left = self.length_of[request.seed] - (self.budget - request.max_new_tokens)
            super().submit(replace(request, max_new_tokens=left, stop_token_ids=frozenset()))

        def step(self) -> list:
            running = self.live - self.queued
            chunks = super().step()
            now = time.time()
            self.busy_slot_s += running * (now - self.ended)
            self.ended = now
            if now >= self.noted + NOTE_S:
                self.noted = now
                line = {"at": now, "tokens": self.generated_tokens, "live": self.live, "busy_slot_s": self.busy_slot_s}
                self.file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            return chunks

    return ForcedFleet
