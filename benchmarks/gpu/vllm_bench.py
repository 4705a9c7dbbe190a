"""What measurements of vLLM on one GPU share: sizes, a server with a random policy, and runs that use it."""

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from part import BENCHMARKS, QWEN3_SHAPES, Part, make_model  # puts april and the harness on sys.path

from common import ROOT, write_lines  # isort: skip
from vllm_engine import GATE  # isort: skip

import torch  # isort: skip
from april.data.tokenizer import Tokenizer  # isort: skip
from april.learner.policy.arithmetic import build_tokenizer  # isort: skip
from april.simulate.probe import load_folder_weights  # isort: skip
from april.workers.engines.sglang.client import SGLangClient  # isort: skip
from april.workers.engines.sglang.server import ServerFailed, SGLangServer, free_port  # isort: skip
from april.workers.engines.vllm.engine import VLLMSettings  # isort: skip


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    shape: dict
    """Keys of the model's config.json."""
    concurrent: tuple[int, ...]
    """Requests in flight, by worth; the first are as many as the server takes."""
    median: int
    longest: int
    """Median response, and where responses are cut (tokens)."""
    prompt: int
    """Prompt of each sample (tokens)."""
    groups: int
    """Groups of a batch of the runs, of 8 samples."""
    scale: float
    """By which lengths are scaled in the runs."""


CARD = Size(QWEN3_SHAPES["0.6B"], (256, 128), median=256, longest=4096, prompt=64, groups=32, scale=0.25)
TINY = Size(QWEN3_SHAPES["tiny"] | {"head_dim": 32}, (32, 16), median=32, longest=256, prompt=16, groups=4, scale=0.5)
SAMPLES, STALENESS, SEED = 8, 8, 0
SPREADS = {"sigma_between": 0.86, "sigma_within": 0.51}
"""Of the log length, between prompts and within a group: together 1."""
PREFETCH = 8
"""Samples that wait in a worker for a free slot, its default; as many wait of the client's."""
STREAM_TOKENS = 32
"""Tokens of an event, the worker's default."""
CACHE_GIB, CACHE_SHARE, UTILIZATION = 30, 0.35, 0.4
"""The server's KV cache, at most this share of the card's memory; and the share that has to be free at its start."""
SIZES = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, 513, 64)]
"""Tokens of the steps that become CUDA graphs; others are padded to the next."""
STARTS: tuple[tuple[str, dict[str, str], dict], ...] = (
    ("graphs", {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}, {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}),
    ("graphs of decode steps", {}, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    ("eager", {}, {}),
)
"""How the server is started on a card, in turn until it starts: environment, and vLLM's compilation. torch.compile, on
which vLLM's graphs of steps with prompts usually rest, takes half a minute; the first way does without."""
START_S, PATIENCE_S = 120.0, 60.0
"""Longest start of the server, and longest wait for anything else (seconds)."""
AGAIN_S = 60.0
"""Seconds that have to be left for another start."""
POLL_S = 0.01
CONFIG = """
[run]
name = "{name}"
dir = "{folder}"
[model]
path = "{policy}"
[data]
path = "{prompts}"
epochs = 1000000
shuffle = false
[reward]
name = "benchmark_verifiers:coin"
[schedule]
kind = "{kind}"
rollout_batch_size = {groups}
n_samples_per_prompt = {samples}
max_staleness = {staleness}
max_steps = 1000000
{dial}
[sampling]
max_response_tokens = {longest}
[engine]
url = "{url}"
[worker]
engine = "vllm_engine:Entry"
count = 1
slots = {slots}
prefetch = {prefetch}
[learner]
ranks = 1
device = "{device}"
microbatch_tokens = 16384
checkpoint_every = 1000000
[samples]
every = 0
"""


class Bench:
    """The server, the policy, and prompts."""

    def __init__(self, part: Part, size: Size, folder: Path, parts: contextlib.ExitStack):
        self.part, self.size, self.folder = part, size, folder
        began = time.monotonic()
        self.policy, self.prompts = make_inputs(folder, size, part.device.type)
        part.fact("vllm: seconds of making the model", round(time.monotonic() - began, 2))
        self.port = free_port()
        self.server = self._spawn(*STARTS[0])
        parts.callback(lambda: self.server.kill())
        self.tensors = load_folder_weights(self.policy)
        self.tokenizer = Tokenizer(self.policy)

    @property
    def lengths(self) -> dict:
        """As keys of `LengthsSection`."""
        return {
            "family": "lognormal", "median_tokens": self.size.median, "longest_tokens": self.size.longest,
            "prompt_tokens": self.size.prompt, **SPREADS,
        }  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Environment in which April's processes find its sources, and the engine."""
        folders = [str(BENCHMARKS / "gpu"), str(BENCHMARKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}

    def _spawn(self, way: str, environment: dict[str, str], compilation: dict) -> SGLangServer:
        on_card = self.part.device.type == "cuda"
        options: dict = {"stream_interval": STREAM_TOKENS}
        if on_card:
            cache = min(CACHE_GIB << 30, int(CACHE_SHARE * torch.cuda.get_device_properties(0).total_memory))
            options |= {"gpu_memory_utilization": UTILIZATION, "kv_cache_memory_bytes": cache}
            graphs = {"compilation_config": json.dumps(compilation | {"cudagraph_capture_sizes": SIZES})}
            options |= graphs if compilation else {"enforce_eager": True}
        settings = HostSettings(
            server_python(), self.policy, self.folder / "server.log", self.part.device.type,
            slots=self.size.concurrent[0], context_tokens=self.size.prompt + self.size.longest + 8, port=self.port,
            start_s=START_S if on_card else 5 * START_S, options=options, more=environment if on_card else {},
        )  # fmt: skip
        server = SGLangServer(settings)
        server.spawn()
        self.way, self.began_s = way, time.monotonic()
        return server

    def await_server(self) -> None:
        """Wait until it answers, started in one of the ways. Raises ServerFailed."""
        for following in (*STARTS[1:], None):
            try:
                info = self.call("/server_info", wait=True)
                break
            except ServerFailed:
                self.part.fact(f"vllm: start with {self.way}: failed", self.log_end())
                if following is None or self.part.device.type == "cpu" or self.part.left_s < AGAIN_S:
                    raise
                self.server = self._spawn(*following)
        self.part.row("gpu_vllm_start_s", time.monotonic() - self.began_s, "s")
        self.part.fact("vllm: server", info | {"way": self.way})

    def call(self, path: str, body: dict | None = None, wait: bool = False) -> dict:
        """The server's answer; `wait`: until it has started."""

        async def answer() -> dict:
            client = SGLangClient(self.server.url, name="vLLM")
            try:
                return await (self.server.wait(client) if wait else client.call(path, body, PATIENCE_S))
            finally:
                await client.close()

        return asyncio.run(answer())

    def await_idle(self) -> None:
        """End what runs in the server, and empty its prefix cache."""
        self.call("/pause_generation", {})
        self.call("/continue_generation", {})

    def log_end(self) -> str:
        return self.server.settings.log.read_text(errors="replace")[-6000:]


@dataclass(frozen=True)
class HostSettings(VLLMSettings):
    """vLLM lies where PYTHONPATH says, unless it has an environment of its own. `more`: for its processes."""

    more: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        found = dict(os.environ) if self.python == Path(sys.executable) else super().environment()
        return found | self.own_environment() | {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | self.more


def server_python() -> Path:
    """This interpreter if it finds vLLM, otherwise that of .venv-vllm in the repository root."""
    return Path(sys.executable) if importlib.util.find_spec("vllm") else ROOT / ".venv-vllm/bin/python"


def make_inputs(folder: Path, size: Size, device: str) -> tuple[Path, Path]:
    """A policy with random weights and prompts of equal length; returns both paths."""
    QWEN3_SHAPES["vllm"] = size.shape
    policy = make_model(folder / "policy", "vllm", torch.bfloat16, size.longest + size.prompt + 8, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    build_tokenizer().save_pretrained(policy)
    return policy, write_lines(folder / "prompts.jsonl", ({"prompt": text, "label": ""} for text in texts(size)))


def texts(size: Size) -> list[str]:
    return [f"{number:0{size.prompt}d}" for number in range(4096)]


# --- processes --------------------------------------------------------------------------------------------------------


def write_config(
    bench: Bench, name: str, kind: str, groups: int, slots: int, longest: int, dial: dict[str, int] | None = None
) -> Path:
    values = {
        "name": name, "folder": bench.folder, "policy": bench.policy, "prompts": bench.prompts, "kind": kind,
        "groups": groups, "samples": SAMPLES, "staleness": STALENESS, "longest": longest, "url": bench.server.url,
        "dial": "".join(f"{key} = {value}\n" for key, value in (dial or {}).items()), "slots": slots,
        "prefetch": PREFETCH, "device": bench.part.device.type,
    }  # fmt: skip
    path = bench.folder / f"{name}.toml"
    path.write_text(CONFIG.format(**values))
    return path


def start(bench: Bench, command: list, log: Path, parts: contextlib.ExitStack) -> subprocess.Popen:
    """A process of April's, which is killed at the end."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env=bench.environment(), cwd=bench.folder
        )
    parts.callback(started.wait)
    parts.callback(started.kill)
    return started


def open_gate(folder: Path, lengths: dict) -> None:
    unfinished = folder / f"{GATE}.partial"
    unfinished.write_bytes(orjson.dumps(lengths))
    unfinished.rename(folder / GATE)


def await_that(
    condition: Callable,
    what: str,
    alive: subprocess.Popen | None = None,
    log: Path | None = None,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Wait until the condition is true. Raises TimeoutError, and RuntimeError if the process has ended."""
    until = time.monotonic() + timeout_s
    while not condition():
        if alive and alive.poll() is not None:
            raise RuntimeError(f"{what}: the process has ended\n{log_end(None, log)}")
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s\n{log_end(None, log)}")
        time.sleep(POLL_S)


def log_end(folder: Path | None, log: Path | None) -> str:
    """The last lines of a process's output, and of its parts' logs."""
    logs = [*([log] if log else []), *(sorted((folder / "logs").glob("*.log")) if folder else [])]
    return "\n".join(f"{each.name}:\n{each.read_text(errors='replace')[-900:]}" for each in logs)
