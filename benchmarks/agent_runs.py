"""Runs with agents as users have them: how many slots idle while tools work, and what a program of one's own costs
beside the built-in environment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
from common import Row
from gauged_engine import GAUGE

from april.data.make_data import make_data
from april.policy.make_policy import make_policy

ROOT = Path(__file__).resolve().parents[1]
SLOTS = 32
TOKEN_S = 0.1
"""the paced engine takes for each step: a turn lasts about three seconds, not much longer than a tool"""
WARM_S, SECONDS = 30.0, 90.0
END_S = 120.0
ARMS = {"agent": "configs/agent.toml", "environment": "configs/calculator.toml"}

PACE = """
[cost]
source = "a step takes {token_s} s, whatever runs"
decode_base_s = {token_s}
decode_running_s = 0.0
decode_kv_s = 0.0
prefill_s = 0.0
"""
CONFIG = """
[run]
name = "tools"
dir = "{folder}/runs"
[model]
path = "{policy}"
[data]
path = "{data}"
[agent]
program = "tool_agent:run"
sessions = {sessions}
chat_template = "{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
[schedule]
kind = "continuous"
rollout_batch_size = 4
n_samples_per_prompt = 4
in_flight = {sessions}
max_steps = 1000
[sampling]
max_response_tokens = 256
[worker]
engine = "gauged_engine:Entry"
count = 1
slots = {slots}
device = "cpu"
[engine]
pace = "{folder}/pace.toml"
[learner]
ranks = 1
device = "cpu"
checkpoint_every = 1000
"""


def idle_slots(folder: Path, policy: Path, data: Path, quick: bool) -> list[Row]:
    """Of an engine whose agents have tools of two seconds, twice as many sessions as slots."""
    config, gauge = folder / "tools.toml", folder / "runs/tools" / GAUGE
    (folder / "pace.toml").write_text(PACE.format(token_s=TOKEN_S))
    config.write_text(CONFIG.format(folder=folder, policy=policy, data=data, slots=SLOTS, sessions=2 * SLOTS))
    warm_s, seconds = (8.0, 4.0) if quick else (WARM_S, SECONDS)
    with (folder / "tools.log").open("wb") as log:
        run = subprocess.Popen(command("run", config), stdout=log, stderr=log, env=environment())
        try:
            first = line_after(gauge, run, 0.0)
            begin = line_after(gauge, run, first["at"] + warm_s)
            end = line_after(gauge, run, begin["at"] + seconds)
        finally:
            stop(run)
    busy_slot_s, turns = (end[key] - begin[key] for key in ("busy_slot_s", "turns"))
    return [
        Row("slots_idle_while_tools_run", [1 - busy_slot_s / (SLOTS * (end["at"] - begin["at"]))], "share"),
        Row("turn_mean", [busy_slot_s / turns], "s"),
    ]


def line_after(gauge: Path, run: subprocess.Popen, at: float) -> dict:
    """The first line of the gauge behind that moment and the first turn, once there is one."""
    while True:
        whole = gauge.read_bytes().rpartition(b"\n")[0] if gauge.exists() else b""
        for line in map(orjson.loads, whole.splitlines()):
            if line["at"] >= at and line["turns"]:
                return line
        if run.poll() is not None:
            raise SystemExit(f"the run has ended, see {gauge.parent}/../../tools.log")
        time.sleep(0.2)


def against_environment(folder: Path, quick: bool) -> list[Row]:
    """The calculator as a program that speaks the OpenAI API, and as the built-in environment: the same task, policy,
    and steps, one run after the other."""
    policy = make_policy(ROOT / "cache/policy", log=lambda line: print(line, file=sys.stderr)).absolute()
    train, heldout = make_data(folder / "calculator-data")
    speeds = {}
    for arm, config in ARMS.items():
        keys = ["--run.dir", folder / "runs", "--run.name", arm, "--model.path", policy, "--data.path", train]
        keys += ["--data.eval_path", heldout, *(["--schedule.max_steps", 1] if quick else [])]
        with (folder / f"{arm}.log").open("wb") as log:
            subprocess.run(command("run", ROOT / config, *keys), stdout=log, stderr=log, env=environment(), check=True)
        summary = orjson.loads((folder / "runs" / arm / "summary.json").read_bytes())
        speeds[arm] = summary["rollout_tokens_per_s"]
    ratio = speeds["agent"] / speeds["environment"]
    rows = [Row(f"{arm}_tokens_per_s", [speed], "tokens/s") for arm, speed in speeds.items()]
    return [Row("agent_vs_environment_tokens_per_s", [ratio], "ratio"), *rows]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "april.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    """In which a run finds the parts that lie here."""
    here = str(Path(__file__).parent)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([here, str(ROOT)])}


def stop(run: subprocess.Popen) -> None:
    run.send_signal(signal.SIGINT)
    try:
        run.wait(END_S)
    finally:
        run.kill()
