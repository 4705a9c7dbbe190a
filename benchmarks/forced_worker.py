"""A worker of a run whose responses have forced lengths, and which writes down how full its engine is.

A length belongs to (group, sample), so that every schedule has the same; everything else is the worker's own.

    python benchmarks/forced_worker.py RUN.toml --connect ADDRESS --name w0 --scenario FILE --gauge FILE --core N
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

import msgspec

import april.workers.worker as worker_module
from april import config as configuration
from april.simulate.scenario import load_scenario
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.run import StreamedRequest
from april.workers.process import run_worker
from april.workers.scoring import LeasedTask
from april.workers.worker import Worker

NOTE_S = 0.2
"""Time between two lines of the gauge (seconds)."""


class Reading(msgspec.Struct):
    """Sums since the worker's start; a difference of two is an interval."""

    at: float
    """Monotonic clock (seconds)."""
    generated: int = 0
    recomputed: int = 0
    """Response tokens whose context is computed again; a server says which it found in its cache."""
    busy_slot_s: float = 0.0
    """Slot-seconds with a sample in the engine."""
    update_slot_s: float = 0.0
    """Slot-seconds from the arrival of new weights to the next token."""


class ForcedWorker(Worker):
    def __init__(self, *arguments, scenario: Path, gauge: Path, core: int | None):
        """`core`: core of the thread that drives the engine; None leaves it where it is."""
        super().__init__(*arguments)
        self.environment_turns.stop_token_ids = frozenset()
        loaded = load_scenario(scenario)
        self.lengths, self.slots = loaded.make_lengths(), loaded.engines.slots
        self.gauge = gauge.open("wb", buffering=0)
        self.reading = Reading(time.monotonic())
        self._next_note = 0.0
        self._in_engine = 0
        """Samples in the decode step under way."""
        self._updating: tuple[float, int] | None = None
        """Start of the update under way, and the tokens generated before it."""
        self.serves = self.config.worker.engine == "sglang"
        if self.serves:
            (server,) = self.engine.engines
            self._watch_server(server)
        if core is not None:
            os.sched_setaffinity(0, {core})

    def _accept(self, lease: LeasedTask) -> None:
        grant, task, tokens = lease
        length = sum(map(len, tokens[1:]))
        if not grant.scoring:
            remaining_tokens = self.lengths.of(task.group)[grant.index] - length
            lease = LeasedTask(msgspec.structs.replace(grant, max_new_tokens=remaining_tokens), task, tokens)
            self.reading.recomputed += 0 if self.serves else length
        super()._accept(lease)

    def _watch_server(self, engine: SGLangEngine) -> None:
        """Note when a server's weights are changed, beside everything else, and what each answer's context costs it."""
        take, change = engine._take, engine._change_weights

        def noted(run: StreamedRequest, event: dict) -> dict | None:
            meta, work = event["meta_info"], self.active.get(run.request.id)
            if work and not run.attempt_tokens and meta.get("completion_tokens"):
                context = len(run.request.tokens) + len(run.generated)
                found = max(len(work.tokens[0]), meta["cached_tokens"])
                self.reading.recomputed += max(0, context - found)
            return take(run, event)

        async def timed(load: Coroutine, expected: dict[str, str]) -> None:
            began, live = time.monotonic(), engine.live
            await change(load, expected)
            if live:
                self._updating = began, engine.generated_tokens

        engine._take, engine._change_weights = noted, timed

    def _load_weights(self) -> None:
        began, before = time.monotonic(), self.engine.version
        super()._load_weights()
        if before is not None and self.engine.version != before and self.engine.live:
            self._updating = began, self.engine.generated_tokens

    def _generate(self) -> None:
        self._in_engine = min(self.engine.live, self.slots)
        super()._generate()

    def run_once(self) -> None:
        super().run_once()
        now, reading, live = time.monotonic(), self.reading, self._in_engine
        reading.busy_slot_s += live * (now - reading.at)
        reading.at, reading.generated = now, self.engine.generated_tokens
        if self._updating and reading.generated > self._updating[1]:
            reading.update_slot_s += live * (now - self._updating[0])
            if self.config.engine.pause != "in_place" and not self.serves:
                reading.recomputed += sum(work.length for work in self.active.values() if not work.finished)
            self._updating = None
        if now >= self._next_note:
            self._next_note = now + NOTE_S
            self.gauge.write(msgspec.json.encode(reading) + b"\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--connect", required=True)
    arguments.add_argument("--name", required=True)
    arguments.add_argument("--scenario", type=Path, required=True, help="has the lengths and the slots")
    arguments.add_argument("--gauge", type=Path, required=True, help="JSONL file that is written")
    arguments.add_argument("--core", type=int, help="of the engine [default: where the worker is]")
    options = arguments.parse_args()
    worker_module.Worker = functools.partial(
        ForcedWorker, scenario=options.scenario, gauge=options.gauge, core=options.core
    )
    run_worker(configuration.load(options.config), options.connect, options.name)


if __name__ == "__main__":
    sys.exit(main())
