"""What a chunk costs the worker that hands it in: `Worker` itself against a broker, with an engine that takes no time.

Leases, rows, checksums, answers, scores and heartbeats are all there. The engine hands over a chunk of every sequence
at once, as one does at a tick. Verifiers run in processes of their own, which do not count.
"""

import random
import time
import uuid
from collections.abc import Iterable
from ctypes import c_long
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from april.config import load
from april.wire.message import Version
from april.wire.sockets.broker import BrokerConnection
from april.workers.engines.base import Chunk, Request
from april.workers.worker import Worker

from .april_side import LEAVE_MS, PATIENCE_S, Door, consume, serving, write_run
from .load import Crew, Load, Window
from .stream import PROMPT_TOKENS, Stream, schedule


def measure(stream: Stream, folder: Path) -> float:
    """Microseconds of processor time of the worker's process for each chunk; `stream` has one session."""
    config = write_run(folder, schedule(stream), stream.longest, prompt_tokens=PROMPT_TOKENS)
    with serving(config) as broker, Crew() as crew:
        door, frontier = Door(broker.address()), RawValue(c_long, 0)
        crew.add(consume, door, frontier)
        crew.add(work, door, config, stream, frontier)
        crew.all_ready()
        load_of = Load(stream.sessions, stream.sequences, stream.window_s, stream.warmup_s)
        _, (seconds, chunks) = crew.work(load_of, broker.pid)
    return seconds / chunks * 1e6


def work(ready, window: Window, door: Door, config_file: Path, stream: Stream, frontier) -> tuple[float, int]:
    """Returns the processor time of the window (seconds), and its chunks."""
    engine = Instant(stream)
    connection = BrokerConnection(door.address, "worker", "w0", uuid.uuid4().hex, PATIENCE_S, None)
    watch = Watch(window, engine, frontier)
    worker = watch.worker = Worker(load(config_file), engine, connection, [watch])
    ready()
    worker.run()
    while any(True for _ in connection.receive(LEAVE_MS)):
        """What is unread at the end would take the goodbye with it."""
    worker.close()
    return watch.ended[0] - watch.began[0], watch.ended[1] - watch.began[1]


class Instant:
    """An engine whose step makes a chunk of every sequence."""

    ready, queued, kv_tokens = True, 0, None

    def __init__(self, stream: Stream):
        self.stream, self.chance = stream, random.Random(0)
        self.version: Version | None = None
        self.capacity = stream.sequences
        self.generated_tokens = self.chunks = 0
        self.left: dict[int, int] = {}
        """chunks to come, by request"""
        self.tokens = np.full(stream.tokens, 5, np.int32)
        self.logprobs = np.full(stream.tokens, -1.0, np.float32)

    @property
    def live(self) -> int:
        return len(self.left)

    def submit(self, request: Request) -> None:
        most = request.max_new_tokens // self.stream.tokens
        self.left[request.id] = self.chance.randint(1, most)

    def step(self) -> list[Chunk]:
        chunks = []
        for number, left in list(self.left.items()):
            finish = "stop" if left == 1 else None
            chunks.append(Chunk(number, self.tokens, self.logprobs, self.version, finish))
            self.left[number] = left - 1
            if finish:
                del self.left[number]
        self.chunks += len(chunks)
        self.generated_tokens += len(chunks) * self.stream.tokens
        return chunks

    def failures(self) -> list[tuple[int, str]]:
        return []

    def cancel(self, request_id: int) -> list[Chunk]:
        self.left.pop(request_id, None)
        return []

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        for number in request_ids:
            self.cancel(number)
        return []

    def close(self) -> None: ...


class Watch:
    """In an intake's place, once a turn: gives the engine the version that the learner has reached, and ends the worker
    with the window."""

    loading = False
    receiver = SimpleNamespace(connect=lambda address, key: None, close=lambda: None)

    def __init__(self, window: Window, engine: Instant, frontier):
        self.window, self.engine, self.frontier = window, engine, frontier
        self.worker: Worker | None = None
        self.began = self.ended = None

    def load(self) -> float | None:
        now = time.process_time(), self.engine.chunks
        if self.began is None and self.window.covers(time.monotonic()):
            self.began = now
        if self.window.over() and self.ended is None:
            self.ended = now
            self.worker.stop("the window is over")
        version = Version(0, self.frontier.value)
        if self.engine.version == version:
            return None
        self.engine.version = version
        return 0.0
