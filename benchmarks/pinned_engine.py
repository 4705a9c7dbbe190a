"""A real engine on a core of its own with its policy, for turns of many schedules; all else runs on other cores."""

import os
import subprocess
import sys
from pathlib import Path

import tomli_w
from common import APRIL, ROOT, start_sglang, write_lines
from core_time import CoreTime, server_processes

from april.learner.policy.warm_start import build_model, save_policy
from april.simulate.probe import load_folder_weights
from april.simulate.scenario import Scenario
from april.workers.engines.sglang.server import SGLangServer

ROWS = 512
PROMPT_TOKENS = 8
BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
TURN_S = 900.0
"""Longest turn (seconds)."""


class PinnedEngine:
    """An engine of `kind` torch or sglang, which has to be closed."""

    def __init__(self, kind: str, folder: Path, slots: int, longest_tokens: int):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit("two cores are needed: one for the engine, the other for all else")
        self.kind, self.folder, self.slots = kind, folder, slots
        self.core, self.others = cores[0], set(cores[1:])
        self.policy = folder / "policy"
        model = build_model(hidden_size=128, layers=3, seed=0)
        model.config.max_position_embeddings = 2 * longest_tokens
        save_policy(model, self.policy)
        self.tensors = load_folder_weights(self.policy)
        prompts = (f"{row % 90 + 10:02d}*{row % 7 + 2}+{row % 50 + 10:02d}=" for row in range(ROWS))
        write_lines(folder / "prompts.jsonl", ({"prompt": prompt, "label": "0"} for prompt in prompts))
        self.longest_tokens = longest_tokens
        self.server = self._start_server() if kind == "sglang" else None
        os.sched_setaffinity(0, self.others)

    def _start_server(self) -> SGLangServer:
        """On the engine's core, all of its processes."""
        os.sched_setaffinity(0, {self.core})
        os.environ[BINDING] = str(self.core)
        return start_sglang(self.policy, self.folder / "server.log", self.slots, self.longest_tokens + 64)

    @property
    def worker_core(self) -> int | None:
        """Where the thread that drives the engine belongs; a server's client has no core of its own."""
        return None if self.server else self.core

    def sends_each_token(self, scenario: Scenario) -> bool:
        """A server that goes on in the midst of its requests has to, lest a token's version be unknown; this costs it
        something without updates, too."""
        return self.kind == "sglang" and scenario.weights.keep_kv

    def write_run(self, folder: Path, scenario: Scenario) -> Path:
        """The configuration of a run with the scenario's schedule, without an end."""
        schedule = scenario.schedule.model_dump(mode="json", exclude_none=True) | {"max_steps": 10**6}
        pause = {"pause": "in_place" if scenario.weights.keep_kv else "abort"}
        if self.sends_each_token(scenario):
            pause["stream_tokens"] = 1
        tree = {
            "seed": scenario.seed,
            "run": {"name": "run", "dir": str(folder)},
            "model": {"path": str(self.policy)},
            "data": {"path": str(self.folder / "prompts.jsonl")},
            "schedule": schedule,
            "sampling": {"max_response_tokens": self.longest_tokens},
            "learner": {"ranks": 1, "checkpoint_every": 10**6},
            "operations": {"http": "none"},
            "weights": {"canary": False},
            "reward": {"name": "benchmark_verifiers:coin"},
            "worker": {"engine": self.kind, "slots": self.slots, "device": "cpu"},
            "engine": {"url": self.server.url if self.server else ""} | pause,
        }
        path = folder / "run.toml"
        path.write_text(tomli_w.dumps(tree))
        return path

    def write_scenario(self, folder: Path, scenario: Scenario) -> Path:
        path = folder / "scenario.toml"
        path.write_text(tomli_w.dumps(scenario.model_dump(mode="json", exclude_none=True)))
        return path

    def core_time(self, client: int) -> CoreTime:
        """Watch the engine's core. `client`: the process that drives the engine, and runs it if it has no server."""
        return CoreTime(*server_processes(self.server._process.pid)) if self.server else CoreTime(client)

    def limit(self, folder: Path, scenario: Scenario) -> float:
        """Tokens/s of the engine driven directly with the scenario's samples in flight."""
        command = [sys.executable, ROOT / "benchmarks/saturated.py", self.write_run(folder, scenario)]
        command += ["--scenario", self.write_scenario(folder, scenario)]
        output, core = self._run(command)
        began, ended, tokens = map(float, output.split())
        return tokens / (ended - began - core.taken(began, ended))

    def calibrate(self, path: Path) -> str:
        """Write the sections of a scenario that `april calibrate` finds; what it says."""
        command = [*APRIL, "calibrate", "--model", self.policy, "--slots", self.slots, "--out", path]
        command += ["--worker.engine", self.kind, "--worker.device", "cpu"]
        return self._run(command + (["--engine.url", self.server.url] if self.server else []))[0]

    def _run(self, command: list) -> tuple[str, CoreTime]:
        """The output of a Python command on the engine's core, or beside its server."""
        cores = self.others if self.server else {self.core}
        with subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        ) as started, self.core_time(started.pid) as core:  # fmt: skip
            output, _ = started.communicate(timeout=TURN_S)
        if started.returncode:
            sys.exit(f"{' '.join(map(str, command))} has ended with status {started.returncode}")
        return output, core

    def close(self) -> None:
        if self.server:
            self.server.kill()
