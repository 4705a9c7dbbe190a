"""A Ray actor queue: one actor holds the prompts and the results, producers and consumers are actors too.

In its best form: a producer hands in all its results and takes the next prompts in one call, a consumer likewise
acknowledges and takes; what is taken stays in the queue until it is acknowledged. Nothing of it is durable.
"""

import importlib.util
import math
import os
import time
from collections import deque
from pathlib import Path

import numpy as np
from common import processor_s

from .load import PROMPT_TOKENS, RECORD_TOKENS, BenchmarkError, Load, Measured, in_own_process, measured, record

CONSUMERS = 2
READ_COUNT = 32
"""Results that a consumer takes at once."""
BACKLOG = 512
"""Results in the queue above which no prompts are given out, so that producers do not run away."""
EMPTY_S = 0.002
"""Wait after an empty answer (seconds)."""
STORE_BYTES = 1 << 30

Result = tuple[int, np.ndarray, np.ndarray]
"""A prompt's number, ids and log-probabilities."""


def measure(load: Load, folder: Path) -> Measured:
    """Run a load against a new queue; Ray starts and ends with a process of its own."""
    if importlib.util.find_spec("ray") is None:
        raise BenchmarkError("ray is not installed; `pip install 'april-rl[bench]'` brings it")
    return in_own_process(_drive, load, folder)


def _drive(tell, load: Load, folder: Path) -> None:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=str(Path(__file__).parents[1]))
    import ray

    ray.init(
        num_cpus=load.producers + CONSUMERS, include_dashboard=False, log_to_driver=False,
        object_store_memory=STORE_BYTES, logging_level="error", _temp_dir=str(folder),
    )  # fmt: skip
    try:
        tell(_run(load))
    finally:
        ray.shutdown()


def _run(load: Load) -> Measured:
    import ray

    actor = ray.remote(num_cpus=0)
    queue = actor(Queue).remote()
    producers = [actor(Producer).remote(queue, number) for number in range(load.producers)]
    consumers = [actor(Consumer).remote(queue) for _ in range(CONSUMERS)]
    ray.get([member.ready.remote() for member in (*producers, *consumers)])
    server = ray.get(queue.process.remote())
    start = time.monotonic() + load.warmup_s
    window = start, start + load.window_s
    acknowledged = [consumer.run.remote(*window) for consumer in consumers]
    submit_ms = [producer.run.remote(*window, load.in_flight) for producer in producers]
    time.sleep(load.warmup_s)
    before_s = processor_s(server)
    time.sleep(load.window_s)
    server_s = processor_s(server) - before_s
    pairs = [pair for pairs in ray.get(acknowledged) for pair in pairs]
    return measured(load, pairs, ray.get(submit_ms), server_s)


class Queue:
    """Prompts without end, results until they are acknowledged."""

    def __init__(self):
        self.prompt = np.random.default_rng(0).integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32)
        self.drawn = 0
        self.leased: dict[int, np.ndarray] = {}
        self.results: deque[Result] = deque()
        self.read: dict[int, Result] = {}

    def process(self) -> int:
        return os.getpid()

    def submit(self, results: list[Result], wanted: int) -> list[tuple[int, np.ndarray]]:
        """Take in results, give out the next `wanted` prompts: (number, ids)."""
        for result in results:
            del self.leased[result[0]]
            self.results.append(result)
        if len(self.results) > BACKLOG:
            return []
        taken = [(self.drawn + i, self.prompt) for i in range(wanted)]
        self.drawn += wanted
        self.leased.update(taken)
        return taken

    def take(self, acknowledged: list[int], wanted: int) -> list[Result]:
        """Forget results that were read, give out the next."""
        for number in acknowledged:
            del self.read[number]
        taken = [self.results.popleft() for _ in range(min(wanted, len(self.results)))]
        self.read.update((result[0], result) for result in taken)
        return taken


class Producer:
    def __init__(self, queue, number: int):
        self.queue = queue
        self.ids, self.logprobs = record(number)

    def ready(self) -> None:
        pass

    def run(self, start: float, end: float, in_flight: int) -> np.ndarray:
        """Submit times of the window: float [records], ms."""
        import ray

        prompts, submit_ms, now = [], [], -math.inf
        while now < end:
            sent_at = time.monotonic()
            results = [(number, self.ids, self.logprobs) for number, _ in prompts]
            prompts = ray.get(self.queue.submit.remote(results, in_flight))
            now = time.monotonic()
            if start <= now < end:
                submit_ms += [(now - sent_at) * 1000] * len(results)
            if not prompts:
                time.sleep(EMPTY_S)
        return np.array(submit_ms)


class Consumer:
    def __init__(self, queue):
        self.queue = queue

    def ready(self) -> None:
        pass

    def run(self, start: float, end: float) -> list[tuple[float, int]]:
        """Acknowledgements in the window: (instant, records)."""
        import ray

        read: list[int] = []
        acknowledged, now = [], -math.inf
        while now < end:
            results = ray.get(self.queue.take.remote(read, READ_COUNT))
            now = time.monotonic()
            if read and start <= now < end:
                acknowledged.append((now, len(read)))
            for number, ids, logprobs in results:
                if not len(ids) == len(logprobs) == RECORD_TOKENS:
                    raise BenchmarkError(f"result {number} is not whole")
            read = [number for number, _, _ in results]
            if not results:
                time.sleep(EMPTY_S)
        return acknowledged
