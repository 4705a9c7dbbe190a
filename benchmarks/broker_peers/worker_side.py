"""The processor time of a chunk in its worker: `Worker` itself against a broker, with an engine that takes no time.

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
from queue import Queue
from types import SimpleNamespace

import numpy as np

from april.config import load
from april.wire.message import Version
from april.wire.sockets.broker import BrokerConnection
from april.workers.engines.base import Chunk, Request
from april.workers.worker import Worker

from .april_side import LEAVE_MS, PATIENCE_S, consume, serving, write_run
from .load import Crew, Load, Window
from .stream import PROMPT_TOKENS, Stream, schedule


def measure(stream: Stream, folder: Path) -> float:
    """Microseconds of processor time of the worker's process for each chunk; `stream` has one session."""
    config = write_run(folder, schedule(stream), stream.longest, prompt_tokens=PROMPT_TOKENS)
    with serving(config) as broker, Crew() as crew:
        address, frontier = broker.address(), RawValue(c_long, 0)
        crew.add(consume, address, frontier)
        crew.add(work, address, config, stream, frontier)
        crew.all_ready()
        load_of = Load(stream.sessions, stream.sequences, stream.window_s, stream.warmup_s)
        _, (seconds, chunks) = crew.work(load_of, broker.pid)
    return seconds / chunks * 1e6


def work(ready, window: Window, address: str, config_file: Path, stream: Stream, frontier) -> tuple[float, int]:
    """Returns the processor time of the window (seconds), and its chunks."""
    engine = InstantEngine(stream)
    connection = BrokerConnection(address, "worker", "w0", uuid.uuid4().hex, PATIENCE_S, None)
    feed = VersionFeed(window, engine, frontier)
    worker = feed.worker = Worker(load(config_file), engine, connection, [feed])
    ready()
    worker.run()
    while any(True for _ in connection.receive(LEAVE_MS)):
        """What is unread at the end would take the goodbye with it."""
    worker.close()
    return feed.ended[0] - feed.began[0], feed.ended[1] - feed.began[1]


class InstantEngine:
    """An engine whose step makes a chunk of every sequence."""

    ready, queued, kv_tokens = True, 0, None

    def __init__(self, stream: Stream):
        self.stream, self.chance = stream, random.Random(0)
        self.version: Version | None = None
        self.capacity = stream.sequences
        self.generated_tokens = self.chunks = 0
        self.remaining_chunks: dict[int, int] = {}
        """Chunks to come, by request."""
        self.tokens = np.full(stream.tokens, 5, np.int32)
        self.logprobs = np.full(stream.tokens, -1.0, np.float32)

    @property
    def live(self) -> int:
        return len(self.remaining_chunks)

    def submit(self, request: Request) -> None:
        most = request.max_new_tokens // self.stream.tokens
        self.remaining_chunks[request.id] = self.chance.randint(1, most)

    def step(self) -> list[Chunk]:
        chunks = []
        for number, remaining in list(self.remaining_chunks.items()):
            finish = "stop" if remaining == 1 else None
            chunks.append(Chunk(number, self.tokens, self.logprobs, self.version, finish))
            self.remaining_chunks[number] = remaining - 1
            if finish:
                del self.remaining_chunks[number]
        self.chunks += len(chunks)
        self.generated_tokens += len(chunks) * self.stream.tokens
        return chunks

    def failures(self) -> list[tuple[int, str]]:
        return []

    def cancel(self, request_id: int) -> list[Chunk]:
        self.remaining_chunks.pop(request_id, None)
        return []

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        for number in request_ids:
            self.cancel(number)
        return []

    def close(self) -> None: ...


class VersionFeed:
    """A weight loader that gives the engine the version that the learner has reached, once a pass of the worker's loop,
    and stops the worker at the end of the window."""

    is_loading = has_pending = False
    loading_version = None
    receiver = SimpleNamespace(
        connect=lambda address, key: None, close=lambda: None, offer=lambda folders: None,
        put_off=lambda put: None, refused=Queue(), has_staged=False, staged_version=None,
    )  # fmt: skip

    def __init__(self, window: Window, engine: InstantEngine, frontier):
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
