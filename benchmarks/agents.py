"""The latency that the agents gateway adds to a turn, and the turns a second it carries: HTTP, broker and journal.

Broker and agents process are those of a run; in place of engines there is a worker that answers at once. Many sessions
ask over HTTP. Then two whole runs: how many slots idle while tools work, and what a program of one's own costs beside
the built-in environment.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import uuid
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import orjson
from common import APRIL, ROOT, Row, execute, parser, process, processor_s, quickstart_policy, report, wait_for
from gauged_engine import GAUGE

from april import wire
from april.data.arithmetic import ALPHABET, make_data
from april.util import clock
from april.wire.message import Version
from april.wire.rows import chunk_row, pack_rows, padded
from april.wire.sockets.broker import BrokerConnection
from april.workers.scoring import leases_of

TURN_TOKENS, CONTEXT_TOKENS = 16, 1024
GROUP = 8
PIECE = "+1"
"""An agent's message behind each answer."""
API_AT = "the API is at "
"""Text before the address in the output of the agents process."""
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
[security]
keys = "off"
[worker]
device = "cpu"
[learner]
device = "cpu"
"""
TOOL_SLOTS = 32
STEP_S = 0.1
"""The paced engine's decode step (seconds): a turn lasts about three seconds, not much longer than a tool."""
TOOL_WARM_S, TOOL_RUN_S = 30.0, 90.0
LEAVE_S = 120.0
"""Longest time in which a run leaves (seconds)."""
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
"""Environment in which a run finds the engine and the program that are here."""
ARMS = {"agent": "configs/agent.toml", "environment": "configs/calculator.toml"}
PACE = """
[cost]
source = "a step takes {step_s} s, whatever runs"
decode_base_s = {step_s}
decode_running_s = 0.0
decode_kv_s = 0.0
prefill_s = 0.0
"""
TOOL_CONFIG = """
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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", action="store_true", help="only the two runs with and without a program")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [] if given.runs else with_scripted_engines(folder, given.quick)
        rows += against_environment(folder, given.quick)
    report(rows, given.json)


def with_scripted_engines(folder: Path, quick: bool) -> list[Row]:
    sessions, seconds = (64, 3.0) if quick else (1000, SECONDS)
    policy = quickstart_policy(folder, quick=True)
    make_data(folder / "data", train_prompts=512, heldout_prompts=8)
    stretch_context(policy)
    rows = measure(folder, policy, sessions, seconds, 40 if quick else ALONE_TURNS)
    return rows + idle_slots(folder, policy, folder / "data/train.jsonl", quick)


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
    log, command = folder / "agents.log", [*APRIL, "agents", config, "--name", "agents-0", "--connect"]
    with process([*APRIL, "broker", config], folder / "broker.log") as broker:
        wait_for((run / "address").exists, "the broker's address", alive=broker)
        address = (run / "address").read_text()
        worker = multiprocessing.get_context("spawn").Process(target=answer_at_once, args=(address,), daemon=True)
        worker.start()
        with process([*command, address], log) as agents:
            wait_for(lambda: API_AT in log.read_text(), "the address of the API", alive=agents)
            url = log.read_text().partition(API_AT)[2].partition(";")[0]
            rows = asyncio.run(converse(url, sessions, seconds, alone))
            sync_s = median_sync(folder)
        worker.terminate()
    return [*rows, Row("sync_median", [1000 * sync_s], "ms")]


def median_sync(folder: Path) -> float:
    """Median time of a small append and its sync on this disk (seconds)."""
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
        Row("gateway_overhead", [1000 * wait for wait in single], "ms"),
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


# --- whole runs -------------------------------------------------------------------------------------------------------


def idle_slots(folder: Path, policy: Path, data: Path, quick: bool) -> list[Row]:
    """Idle slots of an engine whose agents have tools of two seconds and twice as many sessions as it has slots."""
    config, gauge = folder / "tools.toml", folder / "runs/tools" / GAUGE
    (folder / "pace.toml").write_text(PACE.format(step_s=STEP_S))
    values = {"folder": folder, "policy": policy, "data": data, "slots": TOOL_SLOTS, "sessions": 2 * TOOL_SLOTS}
    config.write_text(TOOL_CONFIG.format(**values))
    warm_s, seconds = (8.0, 4.0) if quick else (TOOL_WARM_S, TOOL_RUN_S)
    with process([*APRIL, "run", config], folder / "tools.log", env=os.environ | VARIABLES) as run:
        first = line_after(gauge, run, 0.0)
        begin = line_after(gauge, run, first["at"] + warm_s)
        end = line_after(gauge, run, begin["at"] + seconds)
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(LEAVE_S)
    busy_slot_s, turns = (end[key] - begin[key] for key in ("busy_slot_s", "turns"))
    return [
        Row("slots_idle_while_tools_run", [1 - busy_slot_s / (TOOL_SLOTS * (end["at"] - begin["at"]))], "share"),
        Row("turn_mean", [busy_slot_s / turns], "s"),
    ]


def line_after(gauge: Path, run: subprocess.Popen, at: float) -> dict:
    """The gauge's first line at that moment or later, once a turn has begun."""

    def found() -> dict | None:
        whole = gauge.read_bytes().rpartition(b"\n")[0] if gauge.exists() else b""
        lines = map(orjson.loads, whole.splitlines())
        return next((line for line in lines if line["at"] >= at and line["turns"]), None)

    return wait_for(found, f"the gauge of the run in {gauge.parent}", run, poll_s=0.2)


def against_environment(folder: Path, quick: bool) -> list[Row]:
    """The calculator as a program that speaks the OpenAI API, and as the built-in environment: the same task, policy
    and steps, one run after the other."""
    policy = quickstart_policy(folder, quick=False)
    train, heldout = make_data(folder / "calculator-data")
    speeds, spent = {}, []
    for arm, config in ARMS.items():
        keys = ["--run.dir", folder / "runs", "--run.name", arm, "--model.path", policy, "--data.path", train]
        keys += ["--data.eval_path", heldout, *(["--schedule.max_steps", 1] if quick else [])]
        with ProcessorTimes(folder / "runs" / arm) as times:
            execute([*APRIL, "run", ROOT / config, *keys], folder / f"{arm}.log", threads=1, **VARIABLES)
        if arm == "agent":
            spent = times.rows()
        summary = orjson.loads((folder / "runs" / arm / "summary.json").read_bytes())
        speeds[arm] = summary["rollout_tokens_per_s"]
    ratio = speeds["agent"] / speeds["environment"]
    rows = [Row(f"{arm}_tokens_per_s", [speed], "tokens/s") for arm, speed in speeds.items()]
    return [Row("agent_vs_environment_tokens_per_s", [ratio], "ratio"), *rows, *spent]


PARTS = {
    "program": "april.agents.host",
    "gateway": "april.cli agents",
    "broker": "april.cli broker",
    "workers": "april.cli worker",
}
"""Words in the command line of a run's processes."""


class ProcessorTimes(threading.Thread):
    """Follows the processor time of a run's parts from its first step to its last look before the end.

    with ProcessorTimes(run_dir) as times:
        ...                             # the run
    times.rows()
    """

    def __init__(self, run_dir: Path):
        super().__init__(daemon=True)
        self.run_dir = run_dir
        self.looks: list[tuple[int, dict[str, float]]] = []
        """(turns of the finished steps, processor seconds by part) at each look at which a step had been added."""
        self._ended = threading.Event()

    def __enter__(self) -> "ProcessorTimes":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            with contextlib.suppress(OSError, orjson.JSONDecodeError):
                lines = map(orjson.loads, (self.run_dir / "metrics.jsonl").read_bytes().splitlines())
                turns = sum(line["environment"]["observations"] for line in lines if "environment" in line)
                if turns and (not self.looks or turns > self.looks[-1][0]):
                    self.looks.append((turns, {part: self._processor_s(words) for part, words in PARTS.items()}))

    def rows(self) -> list[Row]:
        """Processor time of each part for a turn, and of how many turns a second two cores would have enough."""
        (first, before), (last, after) = self.looks[0], self.looks[-1]
        if last == first:
            return []
        per_turn = {part: 1000 * (after[part] - before[part]) / (last - first) for part in PARTS}
        turns = Row("turns_per_s_of_the_processors", [1000 * os.cpu_count() / sum(per_turn.values())], "turns/s")
        return [*(Row(f"{part}_processor_ms_per_turn", [each], "ms") for part, each in per_turn.items()), turns]

    def _processor_s(self, words: str) -> float:
        """Processor seconds of the run's processes that have these words in their command line."""
        taken = 0.0
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if words in command.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    taken += processor_s(int(command.parent.name))
        return taken


if __name__ == "__main__":
    main()
