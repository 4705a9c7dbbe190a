"""Our side: `april broker` in a process of its own, producers that speak the workers' protocol, a consumer that
speaks the learner's.

A record is a sample: it is granted with its prompt, answered with one final chunk and its score, and read in a
batch. There is one consumer, since a run has one learner. The schedule is chosen so that it never holds a producer
up: see `schedule`.
"""

import contextlib
import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from ctypes import c_long
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import numpy as np
import orjson
from common import APRIL, write_lines

import april
from april import wire
from april.data.arithmetic import ALPHABET
from april.learner.policy.arithmetic import build_tokenizer
from april.wire.message import Version
from april.wire.security.keygen import make_folder
from april.wire.security.keys import load_keys
from april.wire.sockets.broker import BrokerConnection
from april.workers.reports import Reports

from .load import PROMPT_TOKENS, RECORD_TOKENS, BenchmarkError, Crew, Load, Measured, Window, measured, record

GROUP_SIZE, BATCH_GROUPS = 2, 64
PATIENCE_S = 30.0
PROMPTS = 1024
POLL_MS = 20
PING_S = 0.005
"""Time between two round trips on the control connection (seconds)."""
LEAVE_MS = 300
STOP_S = 90.0
"""Longest wait for the broker to leave (seconds)."""

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(april.__file__).parents[1])}
"""The broker runs the code that this process imports."""


def schedule(load: Load) -> str:
    """TOML of a schedule that never holds the broker up: `continuous`, so that a slot is filled again at once; groups
    of 2, the least that a run takes; and a staleness that admits enough groups for the records in flight, a batch
    that is being made and one that is being read, but not so many that producers run away from the consumer."""
    in_flight = load.producers * load.in_flight
    batch_records = BATCH_GROUPS * GROUP_SIZE
    return f"""
[schedule]
kind = "continuous"
in_flight = {in_flight}
max_staleness = {math.ceil(in_flight / batch_records) + 3}
rollout_batch_size = {BATCH_GROUPS}
n_samples_per_prompt = {GROUP_SIZE}
max_steps = 1000000
"""


def write_run(
    folder: Path,
    schedule: str,
    response_tokens: int = RECORD_TOKENS,
    keys: Path | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Path:
    """The configuration of a run with a tokeniser and prompts; returns the TOML file. `keys`: a folder to make."""
    policy = folder / "policy"
    build_tokenizer().save_pretrained(policy)
    context = prompt_tokens + response_tokens
    (policy / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3", "max_position_embeddings": context}))
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(ALPHABET), prompt_tokens)) for _ in range(PROMPTS)]
    write_lines(folder / "prompts.jsonl", ({"prompt": prompt, "label": "0"} for prompt in prompts))
    if keys:
        make_folder(keys)
    path = folder / "run.toml"
    path.write_text(f"""
run = {{ name = "broker", dir = "{folder}/runs" }}
model = {{ path = "{policy}" }}
data = {{ path = "{folder}/prompts.jsonl", max_prompt_tokens = {prompt_tokens} }}
sampling = {{ max_response_tokens = {response_tokens} }}
learner = {{ ranks = 1 }}
security = {{ keys = "{keys or "off"}" }}
{schedule}
""")
    return path


class Broker:
    """A process of `april broker`."""

    def __init__(self, config: Path):
        self.run_dir = config.parent / "runs" / "broker"
        self.log_path = config.parent / "broker.log"
        with self.log_path.open("ab") as log:
            command = [*APRIL, "broker", str(config), "--broker.bind", "tcp://127.0.0.1:*"]
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=ENVIRONMENT)
        self.pid = self.process.pid

    def address(self, timeout_s: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_s
        file = self.run_dir / "address"
        while time.monotonic() < deadline and self.process.poll() is None:
            if file.exists():
                return file.read_text()
            time.sleep(0.01)
        raise BenchmarkError(f"the broker does not start:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log_path.read_text()[-4000:]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"the broker does not leave within {STOP_S:g} s:\n{self.log_tail()}") from None
        if status:
            raise BenchmarkError(f"the broker has failed with status {status}:\n{self.log_tail()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(config: Path) -> Iterator[Broker]:
    broker = Broker(config)
    try:
        yield broker
        broker.stop()
    finally:
        if broker.process.poll() is None:
            broker.kill()


@dataclass(frozen=True)
class Endpoint:
    """Where peers come in, and with which folder of keys."""

    address: str
    keys: Path | None = None


def measure(load: Load, folder: Path, **options) -> Measured:
    """Run a load against a new broker in an empty folder; options as below."""
    return measure_with_pings(load, folder, **options, pings=False)[0]


def measure_encrypted(load: Load, folder: Path) -> Measured:
    return measure(load, folder, keys=folder / "keys")


def measure_with_pings(
    load: Load, folder: Path, keys: Path | None = None, pings: bool = True
) -> tuple[Measured, np.ndarray]:
    """Run a load beside a peer that pings the broker on a control connection; also returns float [n]: its round trips
    in the window, ms. `keys`: a folder of keys to make, for CURVE on every socket."""
    config = write_run(folder, schedule(load), keys=keys)
    with serving(config) as broker, Crew() as crew:
        endpoint, frontier = Endpoint(broker.address(), keys), RawValue(c_long, 0)
        crew.add(consume, endpoint, frontier)
        crew.all_ready()
        if pings:
            crew.add(ping, endpoint)
        for number in range(load.producers):
            crew.add(produce, endpoint, number, load.in_flight, frontier)
        acknowledged, *others = crew.work(load, broker.pid)
        round_trips = others.pop(0) if pings else np.empty(0)
    return measured(load, acknowledged, others, crew.server_s), round_trips


class Member:
    """A connection that is left in order."""

    def __init__(self, endpoint: Endpoint, role: str, name: str):
        keys = load_keys(endpoint.keys, role)
        self.connection = BrokerConnection(endpoint.address, role, name, uuid.uuid4().hex, PATIENCE_S, keys)
        self.connection.hello([])

    def leave(self) -> None:
        """Say goodbye and read on until nothing comes: what is unread at the end would take the goodbye with it."""
        self.connection.goodbye()
        while any(True for _ in self.connection.receive(LEAVE_MS)):
            pass
        self.connection.close()


def produce(ready, window: Window, endpoint: Endpoint, number: int, in_flight: int, frontier) -> np.ndarray:
    """A worker whose engine takes no time. Returns float [records]: submit times of the window, ms."""
    member = Member(endpoint, "worker", f"producer-{number}")
    connection = member.connection
    ids, logprobs = record(number)
    reports = Reports(connection)
    held = Version(0, -1)
    sent_at: dict[int, float] = {}
    submit_ms = []
    ready()
    while not window.over():
        connection.hold(sent_at)
        if held.step != frontier.value:
            held = Version(0, frontier.value)
            connection.send(wire.WorkerCapacity(held, in_flight))
        for received in connection.receive(POLL_MS):
            match received.message:
                case wire.Grants(grants=grants):
                    for grant in grants:
                        sent_at[grant.lease_id] = time.monotonic()
                        reports.add_chunk(grant.lease_id, 0, ids, logprobs, held, "stop")
                        reports.close(wire.Scored(grant.lease_id, [1.0], [{}]))
                case wire.Answers(done=done):
                    now = time.monotonic()
                    for lease_id in done:
                        reports.forget(lease_id)
                    times_ms = [(now - sent_at.pop(lease_id)) * 1000 for lease_id in done]
                    if window.covers(now):
                        submit_ms += times_ms
                case wire.Renewed() | wire.Evaluating() | wire.WeightsAddress() | wire.Abort():
                    pass
                case unwanted:
                    raise BenchmarkError(f"the broker answers a producer with {unwanted}")
        reports.send()
    member.leave()
    return np.array(submit_ms)


def consume(ready, window: Window, endpoint: Endpoint, frontier) -> list[tuple[float, int]]:
    """A learner that trains in no time: fetch, read, consumed, durable. Returns (instant, records) as acknowledged."""
    member = Member(endpoint, "learner", "consumer")
    connection = member.connection
    connection.request(wire.StartLearner(0, "tcp://127.0.0.1:1"), timeout_s=30)
    acknowledged, step, records, waiting = [], 0, 0, {}
    connection.send(wire.Fetch(0))
    ready()
    while not window.over():
        for received in connection.receive(POLL_MS):
            match received.message:
                case wire.Batch() as batch:
                    records += count_records(batch, received.arrays)
                    if batch.first + len(batch.groups) < batch.total:
                        continue
                    waiting[connection.send(wire.Consumed(step, {}))] = records
                    step, records = step + 1, 0
                    connection.send(wire.Durable(step, step))
                    connection.send(wire.Fetch(step))
                case wire.Accepted():
                    if received.sequence in waiting:
                        frontier.value += 1
                        now, count = time.monotonic(), waiting.pop(received.sequence)
                        if window.covers(now):
                            acknowledged.append((now, count))
                case wire.Renewed():
                    pass
                case unwanted:
                    raise BenchmarkError(f"the broker answers the consumer with {unwanted}")
    member.leave()
    return acknowledged


def count_records(batch: wire.Batch, arrays: list[np.ndarray]) -> int:
    """Take a part of a batch apart as a learner does; its records."""
    pieces = iter(arrays)
    for group in batch.groups:
        prompt = next(pieces)
        for sample in group.samples:
            ids, logprobs = next(pieces), next(pieces)
            if len(prompt) != group.prompt_tokens or not len(ids) == len(logprobs) == sample.response_tokens:
                raise BenchmarkError(f"group {group.group} is not whole: {len(ids)} ids, {len(logprobs)} of the rest")
    return sum(len(group.samples) for group in batch.groups)


def ping(ready, window: Window, endpoint: Endpoint) -> np.ndarray:
    """Heartbeat and its answer on a control connection, again and again. Returns float [n]: ms."""
    member = Member(endpoint, "monitor", "ping")
    connection, round_trips_ms = member.connection, []
    ready()
    while not window.over():
        started = time.monotonic()
        connection.send_control(wire.Heartbeat())
        while not any(isinstance(received.message, wire.Renewed) for received in connection.receive(1000)):
            pass
        now = time.monotonic()
        if window.covers(now):
            round_trips_ms.append((now - started) * 1000)
        time.sleep(PING_S)
    member.leave()
    return np.array(round_trips_ms)
