"""What the gateway of agents adds to a turn, and how many turns a second it carries: HTTP, broker, journal and all.

A broker and an agents process as they are; in place of engines a worker that answers at once. A harness of many
sessions asks over HTTP. Then whole runs: `agent_runs.py`. `--quick`: a few sessions for a few seconds.
"""

import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from agent_runs import against_environment, idle_slots
from common import Row, parser, report

from april import wire
from april.connections.broker import BrokerConnection
from april.data.arithmetic import ALPHABET
from april.data.make_data import make_data
from april.policy.make_policy import Recipe, make_policy
from april.processes import clock
from april.wire.rows import chunk_row, pack_rows, padded
from april.wire.version import Version
from april.workers.scoring import leases_of

TURN_TOKENS, CONTEXT_TOKENS = 16, 1024
GROUP = 8
PIECE = "+1"
"""what an agent adds to the policy's answer"""
SECONDS = 20.0
ALONE_TURNS = 200

CONFIG = """
[run]
name = "agents"
dir = {runs}
[model]
path = {policy}
[data]
path = {data}
[agent]
attach = true
sessions = {sessions}
timeout_s = 3600
[schedule]
kind = "sync"
rollout_batch_size = {groups}
n_samples_per_prompt = 8
max_steps = 1000
[sampling]
max_response_tokens = 1000000
[worker]
device = "cpu"
[learner]
device = "cpu"
"""


def main() -> None:
    given = parser(__doc__).parse_args()
    sessions, seconds = (64, 3.0) if given.quick else (1000, SECONDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = make_policy(folder / "policy", recipe=Recipe(easy_steps=2, clean_steps=2, noisy_steps=2))
        make_data(folder / "data", train_prompts=512, heldout_prompts=8)
        stretch_context(policy)
        rows = measure(folder, policy, sessions, seconds, 40 if given.quick else ALONE_TURNS)
        rows += idle_slots(folder, policy, folder / "data/train.jsonl", given.quick)
        rows += against_environment(folder, given.quick)
    report(rows, given.json)


def stretch_context(policy: Path) -> None:
    """No session is to end before the benchmark does; nobody computes with these weights."""
    path = policy / "config.json"
    shape = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(shape | {"max_position_embeddings": 2_000_000}))


def measure(folder: Path, policy: Path, sessions: int, seconds: float, alone: int) -> list[Row]:
    config, run = folder / "run.toml", folder / "runs/agents"
    values = {"runs": folder / "runs", "policy": policy, "data": folder / "data/train.jsonl"}
    quoted = {key: f'"{value}"' for key, value in values.items()}
    config.write_text(CONFIG.format(**quoted, sessions=sessions, groups=max(1, sessions // GROUP)))
    started: list[subprocess.Popen] = []
    try:
        started.append(april("broker", config))
        address = wait_for(run / "address", started[0])
        worker = multiprocessing.get_context("spawn").Process(target=answer_at_once, args=(address,), daemon=True)
        worker.start()
        log = folder / "agents.log"
        with log.open("wb") as stderr:
            started.append(april("agents", config, "--connect", address, "--name", "agents-0", stderr=stderr))
        url = api_of(log, started[1])
        rows = asyncio.run(converse(url, sessions, seconds, alone))
        sync_s = median_sync(folder)
        worker.terminate()
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [*rows, Row("sync_median", [1000 * sync_s], "ms")]


def april(*arguments: object, **more: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "april.cli", *map(str, arguments)], **more)


def wait_for(path: Path, process: subprocess.Popen) -> str:
    while not path.exists():
        assert process.poll() is None, "it has ended"
        time.sleep(0.05)
    return path.read_text()


def api_of(log: Path, process: subprocess.Popen) -> str:
    while "the API is at " not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return log.read_text().partition("the API is at ")[2].partition(";")[0]


def median_sync(folder: Path) -> float:
    """Of a small append on this disk, in seconds."""
    times = []
    with (folder / "probe").open("wb") as file:
        for _ in range(200):
            file.write(bytes(500))
            file.flush()
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


# --- in place of an engine ------------------------------------------------------------------------------------


def answer_at_once(address: str) -> None:
    """A worker that has the tokens of a turn when it is granted."""
    connection = BrokerConnection(address, "worker", "scripted", uuid.uuid4().hex)
    connection.hello([])
    connection.send(wire.WorkerCapacity(Version(0, 0), 100_000))
    ids = np.arange(4, 4 + TURN_TOKENS, dtype="<i4").tobytes()
    payload, leases = ids + bytes(4 * TURN_TOKENS), set()
    while True:
        rows = []
        for received in connection.receive(20):
            match received.message:
                case wire.Grants():
                    for lease in leases_of(received):
                        start = sum(map(len, lease.tokens[1:]))
                        number = lease.grant.lease_id
                        leases.add(number)
                        rows.append(
                            chunk_row(number, start, TURN_TOKENS, Version(0, 0), "length", payload, clock.now())
                        )
                case wire.Answers():
                    leases.difference_update(received.message.done)
        if rows:
            payloads = payload.ljust(padded(len(payload)), b"\0") * len(rows)
            connection.send(wire.Report(), [np.frombuffer(pack_rows(rows), "u1"), np.frombuffer(payloads, "u1")])
        connection.hold(leases)


# --- the harness ----------------------------------------------------------------------------------------------


async def converse(url: str, sessions: int, seconds: float, alone: int) -> list[Row]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as http:
        keys = [await take(http, url) for _ in range(sessions)]
        agents = [Agent(http, url, key) for key in keys]
        await asyncio.gather(*(agent.turn() for agent in agents))
        single = [await agents[0].turn() for _ in range(alone)]
        begin = time.perf_counter()
        await asyncio.gather(*(agent.talk(begin + seconds) for agent in agents))
        elapsed = time.perf_counter() - begin
        waits = [wait for agent in agents for wait in agent.waits]
    return [
        Row("gateway_turns_per_s", [len(waits) / elapsed], "turns/s"),
        Row("gateway_overhead", [1000 * one for one in single], "ms"),
        Row("turn_p99_loaded", [1000 * float(np.quantile(waits, 0.99))], "ms"),
        Row("sessions", [sessions], ""),
    ]


async def take(http: aiohttp.ClientSession, url: str) -> str:
    async with http.post(f"{url}/sessions", json={"wait_s": 60}) as response:
        assert response.status == 201, response.status
        return (await response.json())["api_key"]


class Agent:
    """Says a long text first, and a short one behind each answer."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str):
        self.http, self.url, self.key = http, url, key
        text = (ALPHABET * (CONTEXT_TOKENS // len(ALPHABET) + 1))[:CONTEXT_TOKENS]
        self.messages = [{"role": "user", "content": text}]
        self.waits: list[float] = []

    async def talk(self, until: float) -> None:
        while time.perf_counter() < until:
            self.waits.append(await self.turn())

    async def turn(self) -> float:
        """Seconds from the request to its answer."""
        begin = time.perf_counter()
        body = {"model": "any", "messages": self.messages, "max_tokens": TURN_TOKENS}
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.http.post(f"{self.url}/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            said = (await response.json())["choices"][0]["message"]["content"]
        took = time.perf_counter() - begin
        self.messages = [*self.messages, {"role": "assistant", "content": said}, {"role": "user", "content": PIECE}]
        return took


if __name__ == "__main__":
    main()
