"""Harm to a real server behind an engine, and what must hold afterwards."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from april.workers.engines.base import Request
from tests.workers.engine_driving import V0, Stream, assert_true_logprobs, drive, join, prompt

PATIENCE_S = 600.0


def server_processes(engine) -> list[int]:
    """The server and its children, all in one process group."""
    group = engine._server._process.pid
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if group_of(pid) == group]


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def kill_all(engine):
    os.killpg(engine._server._process.pid, signal.SIGKILL)


def send(engine, name: str, number: int):
    """A signal to the one process of the server that is called so."""
    (process,) = [pid for pid in server_processes(engine) if name in name_of(pid)]
    os.kill(process, number)


def assert_samples_survive(engine, model, harm: Callable[[], None], server: str):
    """Every sample that runs when the server is done harm to fails with a sentence, and goes on from what had arrived
    of it once the server has been started again."""
    if engine.version is None:
        bring_back(engine, model)
    requests = [Request(i, prompt(3 + i, seed=i), 600, temperature=0.0) for i in range(6)]
    before = drive(engine, requests, tokens=240)
    sampled = engine.generated_tokens
    harm()
    chunks, failures, deadline = [], [], time.monotonic() + PATIENCE_S
    while engine.live and time.monotonic() < deadline:
        chunks += engine.step()
        failures += engine.failures()
    chunks += engine.step()
    assert {key for key, _ in failures} == {request.id for request in requests}
    assert all(server in why for _, why in failures)
    assert engine.version is None and engine.capacity == 0
    assert engine.generated_tokens >= sampled, "what had arrived is not taken back"
    bring_back(engine, model)
    parts = {r.id: join(before[r.id], Stream([c for c in chunks if c.id == r.id])) for r in requests}
    resumed = [
        replace(r, tokens=np.concatenate([r.tokens, np.array(parts[r.id].tokens, np.int32)]),
                max_new_tokens=r.max_new_tokens - len(parts[r.id].tokens))
        for r in requests
    ]  # fmt: skip
    after = drive(engine, resumed)
    for request in requests:
        stream = join(parts[request.id], after[request.id])
        assert len(stream.tokens) == 600 and len(parts[request.id].tokens) > 0
        assert_true_logprobs(model, request, stream)


def bring_back(engine, model):
    deadline = time.monotonic() + PATIENCE_S
    while not engine.ready and time.monotonic() < deadline:
        engine.step()
    engine.load_weights(V0, model.weights())
