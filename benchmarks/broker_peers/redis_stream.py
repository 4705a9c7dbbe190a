"""Redis doing what a broker does for a stream of chunks, with the same promise: append-only file, `appendfsync always`.

A script checks that the lease is current and that the chunk starts at the stored length before it adds the chunk to the
sample's stream; a tick of a worker is one pipeline. A response's last chunk stores its score and, with the last of its
group, hands the group to the consumer, who reads the streams and deletes them.
"""

import contextlib
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import redis

from .load import BenchmarkError, Crew, Load, Window
from .stream import GROUP_SIZE, PROMPT_TOKENS, Stream, Streamed

TAKE = """
local taken = {}
for index = 1, tonumber(ARGV[1]) do
  local number = redis.call('INCR', 'next')
  local group = math.floor((number - 1) / tonumber(ARGV[2]))
  local lease = redis.call('INCR', 'lease')
  redis.call('HSET', 's' .. number, 'lease', lease, 'length', 0, 'group', group)
  taken[#taken + 1] = {number, lease, ARGV[3]}
end
return taken
"""
"""Lease the next samples, so many of them: number, lease and prompt of each."""
CHUNK = """
local found = redis.call('HMGET', KEYS[1], 'lease', 'length', 'group')
if found[1] ~= ARGV[1] then return -1 end
if found[2] ~= ARGV[2] then return tonumber(found[2]) end
redis.call('XADD', 't' .. KEYS[1], '*', 'd', ARGV[4])
local length = tonumber(ARGV[2]) + tonumber(ARGV[3])
if ARGV[5] == '' then
  redis.call('HSET', KEYS[1], 'length', length)
else
  redis.call('HSET', KEYS[1], 'length', length, 'score', ARGV[5], 'lease', 0)
  if redis.call('HINCRBY', 'groups', found[3], 1) == tonumber(ARGV[6]) then
    redis.call('HDEL', 'groups', found[3])
    redis.call('RPUSH', 'ready', found[3])
  end
end
return length
"""
"""Store a chunk of a lease from a start, with the score if it is the last."""
BLOCK_S = 1
CONSUMERS = 1


def measure(stream: Stream, folder: Path) -> Streamed:
    with serving(folder) as (port, pid), Crew() as crew:
        for _ in range(CONSUMERS):
            crew.add(consume, port, stream)
        crew.all_ready()
        for number in range(stream.processes):
            crew.add(run_sessions, port, number, stream)
        load = Load(stream.sessions, stream.sequences, stream.window_s, stream.warmup_s)
        results = crew.work(load, pid)[CONSUMERS:]
    chunks = sum(count for count, _ in results)
    return Streamed(
        chunks / stream.window_s,
        crew.server_s / chunks * 1e6,
        np.concatenate([times_ms for _, times_ms in results]),
        np.empty(0),
    )


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


def run_sessions(ready, window: Window, port: int, number: int, stream: Stream) -> tuple[int, np.ndarray]:
    """A process of workers that take turns, each with a pipeline a tick: what one awaits, others use."""
    client, chance = redis.Redis(port=port), random.Random(number)
    take, chunk = client.register_script(TAKE), client.register_script(CHUNK)
    payload = np.arange(stream.tokens, dtype="<i4").tobytes() + np.full(stream.tokens, -1.0, "<f4").tobytes()
    prompt = np.zeros(PROMPT_TOKENS, "<i4").tobytes()
    workers: list[list[list[int]]] = [[] for _ in range(number, stream.sessions, stream.processes)]
    counted, times_ms = 0, []
    ready()
    while not window.over():
        for samples in workers:
            if wanted := stream.sequences - len(samples):
                for name, lease, _ in take(args=[wanted, GROUP_SIZE, prompt]):
                    samples.append([name, lease, 0, chance.randint(1, 2 * stream.mean_chunks - 1)])
            sent_at = time.monotonic()
            with client.pipeline(transaction=False) as pipe:
                for name, lease, length, remaining in samples:
                    last = "1.0" if remaining == 1 else ""
                    arguments = [lease, length, stream.tokens, payload, last, GROUP_SIZE]
                    chunk(keys=[f"s{name}"], args=arguments, client=pipe)
                lengths = pipe.execute()
            now = time.monotonic()
            if lengths != [length + stream.tokens for _, _, length, _ in samples]:
                raise BenchmarkError("a chunk was not taken")
            if window.covers(now):
                counted += len(samples)
                times_ms.append((now - sent_at) * 1000)
            samples[:] = [
                [name, lease, length + stream.tokens, remaining - 1]
                for name, lease, length, remaining in samples
                if remaining > 1
            ]
    return counted, np.array(times_ms)


def consume(ready, window: Window, port: int, stream: Stream) -> int:
    """Read each group that is ready, every chunk of it, and delete it."""
    client, groups = redis.Redis(port=port), 0
    ready()
    while not window.over():
        taken = client.blpop("ready", BLOCK_S)
        if taken is None:
            continue
        first = int(taken[1]) * GROUP_SIZE + 1
        keys = [f"s{number}" for number in range(first, first + GROUP_SIZE)]
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, "length")
                pipe.xrange(f"t{key}")
                pipe.delete(key, f"t{key}")
            answers = pipe.execute()
        for length, entries in zip(answers[::3], answers[1::3], strict=True):
            tokens = sum(len(fields[b"d"]) // 8 for _, fields in entries)
            if tokens != int(length):
                raise BenchmarkError(f"a response of {int(length)} tokens has {tokens}")
        groups += 1
    return groups
