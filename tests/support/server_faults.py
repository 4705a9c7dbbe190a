"""Injects faults into a real inference server behind an engine, and checks that the engine recovers."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, Stream, drive, join, prompt

PATIENCE_S = 600.0
HUNG_S = 4.0
"""Silence after which a faulted server counts as hung (seconds); a restarted server has longer for its first
request."""
LONG = [Request(i, prompt(3 + i, seed=i), 600, temperature=0.0) for i in range(6)]


def server_processes(engine) -> list[int]:
    """Process ids of the server and its children, which form one process group."""
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
    """Send the signal `number` to the one process of the server whose command line contains `name`."""
    (process,) = [pid for pid in server_processes(engine) if name in name_of(pid)]
    os.kill(process, number)


def run_until(condition, engine, turn=lambda: None):
    """Step the engine until the condition holds; returns its (chunks, failures). `turn` is called after each step."""
    chunks, failures, deadline = [], [], time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        chunks += engine.step()
        failures += engine.failures()
        turn()
    return chunks, failures


def bring_back(engine, model):
    run_until(lambda: engine.ready, engine)
    engine.load_weights(V0, model.weights())


def rest_of(request, stream):
    """Request for the tokens that remain to be generated after the tokens of a stream."""
    tokens = np.concatenate([request.tokens, np.array(stream.tokens, np.int32)])
    return replace(request, tokens=tokens, max_new_tokens=request.max_new_tokens - len(stream.tokens))


def streams_of(chunks):
    return {key: Stream([chunk for chunk in chunks if chunk.id == key]) for key in {chunk.id for chunk in chunks}}


def assert_whole_and_true(models, requests, *parts):
    """Check that each request's streams in `parts`, joined, have all its tokens, each with the log-probability of the
    version that it names."""
    for request in requests:
        stream = join(*(part[request.id] for part in parts if request.id in part))
        assert len(stream.tokens) == request.max_new_tokens and stream.versions == sorted(stream.versions)
        context, start = [*request.tokens.tolist(), *stream.tokens], len(request.tokens)
        by_version = {version: model.logprobs(context, start) for version, model in models.items()}
        expected = [float(by_version[version][i]) for i, version in enumerate(stream.versions)]
        np.testing.assert_allclose(stream.logprobs, expected, atol=1e-4, rtol=0)


def assert_samples_survive(engine, model, harm: Callable[[], None], server: str):
    """Check that a fault (`harm`) fails every running request with a sentence, and that each request can continue from
    the tokens received so far once the server is back."""
    before = drive(engine, LONG, tokens=240, begun=range(6))
    sampled, patience_s, engine.stall_s = engine.generated_tokens, engine.stall_s, HUNG_S
    try:
        harm()
        chunks, failures = run_until(lambda: not engine.live, engine)
    finally:
        engine.stall_s = patience_s
    chunks += engine.step()
    failures += engine.failures()
    assert {key for key, _ in failures} == {request.id for request in LONG}
    assert all(server in why for _, why in failures)
    assert engine.version is None and engine.capacity == 0
    assert engine.generated_tokens >= sampled, "what had arrived is not taken back"
    bring_back(engine, model)
    late = streams_of(chunks)
    parts = {r.id: join(before[r.id], late.get(r.id, Stream([]))) for r in LONG}
    assert all(part.tokens for part in parts.values())
    after = drive(engine, [rest_of(request, parts[request.id]) for request in LONG])
    assert_whole_and_true({V0: model}, LONG, parts, after)
