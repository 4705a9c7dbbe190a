"""Our side: `april broker` in a process of its own, and a consumer that speaks the learner's
protocol. There is one consumer, since a run has one learner.
"""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
from common import APRIL, write_lines

import april
from april import wire
from april.data.arithmetic import ALPHABET
from april.learner.policy.arithmetic import build_tokenizer
from april.wire.sockets.broker import BrokerConnection

from .load import BenchmarkError, Window

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


def write_run(folder: Path, schedule: str, response_tokens: int, prompt_tokens: int = 128) -> Path:
    """The configuration of a run with a tokeniser and prompts; returns the TOML file."""
    policy = folder / "policy"
    build_tokenizer().save_pretrained(policy)
    context = prompt_tokens + response_tokens
    (policy / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3", "max_position_embeddings": context}))
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(ALPHABET), prompt_tokens)) for _ in range(PROMPTS)]
    write_lines(folder / "prompts.jsonl", ({"prompt": prompt, "label": "0"} for prompt in prompts))
    path = folder / "run.toml"
    path.write_text(f"""
run = {{ name = "broker", dir = "{folder}/runs" }}
model = {{ path = "{policy}" }}
data = {{ path = "{folder}/prompts.jsonl", max_prompt_tokens = {prompt_tokens} }}
sampling = {{ max_response_tokens = {response_tokens} }}
learner = {{ ranks = 1 }}
security = {{ keys = "off" }}
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


class Member:
    """A connection that is left in order."""

    def __init__(self, address: str, role: str, name: str):
        self.connection = BrokerConnection(address, role, name, uuid.uuid4().hex, PATIENCE_S, None)
        self.connection.hello([])

    def leave(self) -> None:
        """Say goodbye and read on until nothing comes: what is unread at the end would take the goodbye with it."""
        self.connection.goodbye()
        while any(True for _ in self.connection.receive(LEAVE_MS)):
            pass
        self.connection.close()


def consume(ready, window: Window, address: str, frontier) -> None:
    """A learner that trains in no time: fetch, read, consumed, durable; `frontier` counts acknowledged batches."""
    member = Member(address, "learner", "consumer")
    connection = member.connection
    connection.request(wire.StartLearner(0, "tcp://127.0.0.1:1"), timeout_s=30)
    step, waiting = 0, set()
    connection.send(wire.Fetch(0))
    ready()
    while not window.over():
        for received in connection.receive(POLL_MS):
            match received.message:
                case wire.Batch() as batch:
                    take_apart(batch, received.arrays)
                    if batch.first + len(batch.groups) < batch.total:
                        continue
                    waiting.add(connection.send(wire.Consumed(step, {})))
                    step += 1
                    connection.send(wire.Durable(step, step))
                    connection.send(wire.Fetch(step))
                case wire.Accepted():
                    if received.sequence in waiting:
                        frontier.value += 1
                        waiting.remove(received.sequence)
                case wire.Renewed():
                    pass
                case unwanted:
                    raise BenchmarkError(f"the broker answers the consumer with {unwanted}")
    member.leave()


def take_apart(batch: wire.Batch, arrays: list[np.ndarray]) -> None:
    """Take a part of a batch apart as a learner does."""
    pieces = iter(arrays)
    for group in batch.groups:
        prompt = next(pieces)
        for sample in group.samples:
            ids, logprobs = next(pieces), next(pieces)
            if len(prompt) != group.prompt_tokens or not len(ids) == len(logprobs) == sample.response_tokens:
                raise BenchmarkError(f"group {group.group} is not whole: {len(ids)} ids, {len(logprobs)} of the rest")


def ping(ready, window: Window, address: str) -> np.ndarray:
    """Heartbeat and its answer on a control connection, again and again. Returns float [n]: ms."""
    member = Member(address, "monitor", "ping")
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
