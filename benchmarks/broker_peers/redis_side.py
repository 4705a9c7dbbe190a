"""Redis Streams with `appendfsync always`: one stream of prompts, one of results, each with a consumer group.

In its best form: whatever a producer or consumer has to say travels in one pipeline, so that handing in results,
acknowledging prompts and taking the next ones is one round trip; entries are deleted with their acknowledgement,
so that memory stays bounded; the append-only file is never rewritten meanwhile.
"""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import redis

from .load import PROMPT_TOKENS, RECORD_TOKENS, BenchmarkError, Crew, Load, Measured, Window, measured, record

PROMPTS, RESULTS, GROUP = "prompts", "results", "group"
CONSUMERS = 2
READ_COUNT = 32
"""Results that a consumer takes at once."""
BLOCK_MS = 50
BACKLOG = 512
"""Most entries in both streams, so that producers do not run away from the consumers."""
FEED_COUNT = 64


def measure(load: Load, folder: Path) -> Measured:
    """Run a load against a new server with its files in an empty folder."""
    with serving(folder) as (port, pid), Crew() as crew:
        crew.add(feed, port)
        crew.all_ready()
        for number in range(CONSUMERS):
            crew.add(consume, port, number)
        for number in range(load.producers):
            crew.add(produce, port, number, load.in_flight)
        _, *results = crew.work(load, pid)
    acknowledged = [pair for pairs in results[:CONSUMERS] for pair in pairs]
    return measured(load, acknowledged, results[CONSUMERS:], crew.server_s)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[int, int]]:
    """A server of its own; yields its port and its process."""
    program = shutil.which("redis-server")
    if program is None:
        raise BenchmarkError("redis-server is not installed; `apt-get install redis-server` brings it")
    port = free_port()
    settings = {
        "port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes", "appendfsync": "always",
        "auto-aof-rewrite-percentage": 0, "loglevel": "warning",
    }  # fmt: skip
    arguments = [str(part) for key, value in settings.items() for part in (f"--{key}", value)]
    with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(port, process)
            yield port, process.pid
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(redis.ConnectionError):
            redis.Redis(port=port).ping()
            return
        time.sleep(0.02)
    raise BenchmarkError("redis-server does not start; run it by hand with --appendonly yes to see why")


def feed(ready, window: Window, port: int) -> None:
    """Keep prompts waiting, but no more than the consumers keep up with."""
    client = redis.Redis(port=port)
    for stream in (PROMPTS, RESULTS):
        client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    prompt = np.random.default_rng(0).integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32).tobytes()
    ready()
    while not window.over():
        if client.xlen(PROMPTS) + client.xlen(RESULTS) > BACKLOG - FEED_COUNT:
            time.sleep(0.002)
            continue
        with client.pipeline(transaction=False) as pipe:
            for _ in range(FEED_COUNT):
                pipe.xadd(PROMPTS, {"ids": prompt})
            pipe.execute()


def produce(ready, window: Window, port: int, number: int, in_flight: int) -> np.ndarray:
    """Take up to `in_flight` prompts, hand in their results, and so on. Returns float [records]: submit times, ms."""
    client, name = redis.Redis(port=port), f"producer-{number}"
    ids, logprobs = (array.tobytes() for array in record(number))
    prompts: list[bytes] = []
    submit_ms = []
    ready()
    while not window.over():
        sent_at = time.monotonic()
        with client.pipeline(transaction=False) as pipe:
            for prompt in prompts:
                pipe.xadd(RESULTS, {"prompt": prompt, "ids": ids, "logprobs": logprobs})
            if prompts:
                pipe.xack(PROMPTS, GROUP, *prompts)
                pipe.xdel(PROMPTS, *prompts)
            pipe.xreadgroup(GROUP, name, {PROMPTS: ">"}, count=in_flight, block=BLOCK_MS)
            *_, taken = pipe.execute()
        now = time.monotonic()
        if window.covers(now):
            submit_ms += [(now - sent_at) * 1000] * len(prompts)
        prompts = [entry for _, entries in taken for entry, _ in entries]
    return np.array(submit_ms)


def consume(ready, window: Window, port: int, number: int) -> list[tuple[float, int]]:
    """Read each result once and acknowledge it. Returns (instant, records) as acknowledged in the window."""
    client, name = redis.Redis(port=port), f"consumer-{number}"
    results: list[bytes] = []
    acknowledged = []
    ready()
    while not window.over():
        with client.pipeline(transaction=False) as pipe:
            if results:
                pipe.xack(RESULTS, GROUP, *results)
                pipe.xdel(RESULTS, *results)
            pipe.xreadgroup(GROUP, name, {RESULTS: ">"}, count=READ_COUNT, block=BLOCK_MS)
            *_, taken = pipe.execute()
        now = time.monotonic()
        if results and window.covers(now):
            acknowledged.append((now, len(results)))
        entries = [entry for _, entries in taken for entry in entries]
        for _, fields in entries:
            ids, logprobs = np.frombuffer(fields[b"ids"], "<i4"), np.frombuffer(fields[b"logprobs"], "<f4")
            if not len(ids) == len(logprobs) == RECORD_TOKENS:
                raise BenchmarkError(f"a result is not whole: {len(ids)} ids, {len(logprobs)} log-probabilities")
        results = [entry for entry, _ in entries]
    return acknowledged
