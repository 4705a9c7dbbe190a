"""A run over several hosts, which are network namespaces of this machine: what the way between its parts costs.

Needs root, iproute2 and Slurm (`launch/install-slurm.sh`). The parts are those that `april launch` starts, with CURVE
on. All hosts share this machine's cores, so a ratio says what the network adds, and not what further machines bring.

Over slow links it is the quickstart that runs: its policy, prompts and batches. Its steps last some seconds, those of
users minutes, so the ratio is a bound from below. Broker and learner are on one site and the worker is beyond the link,
as whoever has two sites places them. A row of its own has the learner's two ranks on both sides, where each of their
collectives crosses the link.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import orjson
from common import ROOT, Row, parser, quickstart_policy, report

from april.data.arithmetic import make_data
from april.wire.security import keygen

sys.path.insert(0, str(ROOT))
from tests.support.hosts import hosts as harness
from tests.support.hosts.hosts import Hosts, Link
from tests.support.hosts.parts import Parts, parts
from tests.support.run_processes import APRIL, wait_until

HOSTS, REPEATS = 4, 3
DELAY_S = 0.02
"""Delay of one way between any two hosts (seconds)."""
FAR_STEPS = 10
"""Steps of the quickstart over slow links."""
GROUPS = 8
"""Groups of a batch."""
STEPS = 12
PROMPTS = 512
UNCOUNTED = 2
"""First steps, which hold what is done once."""
SLURM_STEPS = 10
"""Steps before the job is queued again."""
LONGEST_S = 600.0
PARITY = """
def parity(response, label):
    return sum(map(ord, response)) % 2
"""
"""A reward that an untrained policy gets as often as not, so that rewards differ within each group."""


@dataclass
class Bench:
    """Where runs are made, and their figures by row."""

    folder: Path
    quick: bool
    measured: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0

    def __post_init__(self) -> None:
        self.steps = UNCOUNTED + 3 if self.quick else STEPS
        self.policy = quickstart_policy(self.folder, quick=True)
        self.prompts = self.folder / "prompts.jsonl"
        self.prompts.write_text("".join(f'{{"prompt": "{row:03d}*3+60=", "label": ""}}\n' for row in range(PROMPTS)))
        (self.folder / "parity.py").write_text(PARITY)
        self.config_file = self.folder / "run.toml"
        self.config_file.write_text((ROOT / "configs/quickstart.toml").read_text())
        keygen.make_folder(self.folder / "keys")

    def note(self, name: str, value: float) -> None:
        self.measured.setdefault(name, []).append(value)
        print(f"{name}: {value:.3g}", file=sys.stderr, flush=True)

    def quickstart(self) -> dict[str, object]:
        """Keys that make a run the quickstart's."""
        policy = self.policy if self.quick else quickstart_policy(self.folder, quick=False)
        prompts, heldout = make_data(self.folder / "data")
        return {
            "model__path": policy,
            "data__path": prompts,
            "data__eval_path": heldout,
            "schedule__max_steps": UNCOUNTED + 2 if self.quick else FAR_STEPS,
            "schedule__rollout_batch_size": 32,
            "schedule__over_sampling_batch_size": 48,
            "sampling__max_response_tokens": 512,
            "reward__name": "final_answer",
        }

    def options(self, **changes: object) -> dict[str, object]:
        self.runs += 1
        return {
            "run.name": f"hosts-{self.runs}",
            "run.dir": self.folder,
            "model.path": self.policy,
            "data.path": self.prompts,
            "data.eval_path": self.prompts,
            "evaluation.prompts": 8,
            "schedule.max_steps": self.steps,
            "schedule.rollout_batch_size": GROUPS,
            "schedule.over_sampling_batch_size": GROUPS * 3 // 2,
            "sampling.max_response_tokens": 64,
            "reward.name": "parity:parity",
            "worker.count": 1,
            "security.keys": self.folder / "keys",
        } | {key.replace("__", "."): value for key, value in changes.items()}

    @contextmanager
    def run(self, link: Link | None = None, **changes: object) -> Iterator[Parts]:
        """One on fresh hosts, with its broker on the first and a worker on the last."""
        options = self.options(**changes)
        run_dir = self.folder / str(options["run.name"])
        with (
            tempfile.TemporaryDirectory(prefix="hosts") as state,
            harness.hosts(HOSTS, Path(state), link) as made,
            parts(made, self.config_file, run_dir, options) as run,
        ):
            run.broker(0)
            run.join("worker", HOSTS - 1)
            yield run


def two_nodes(bench: Bench, turn: int) -> None:
    """The learner's two ranks on one host and on two, on the same batches."""
    seconds = {}
    for nodes in sorted((1, 2), reverse=bool(turn % 2)):
        with bench.run(schedule__kind="sync", schedule__over_sampling_batch_size=GROUPS) as run:
            run.learner([1, 2][:nodes])
            bench.note("clean_end_s", seconds_to_leave(run))
            seconds[nodes] = median(step["learner"]["train_s"] for step in run.steps()[UNCOUNTED:])
            bench.note(f"step_on_{nodes}_hosts_s", seconds[nodes])
    bench.note("two_node_learner_ratio", seconds[2] / seconds[1])


def seconds_to_leave(run: Parts) -> float:
    """From when the policy was written, the run's last work, to the end of the last process of any host."""
    ended = max(run.wait(LONGEST_S).values())
    return ended - max(path.stat().st_mtime for path in (run.run_dir / "checkpoints/policy").iterdir())


def wan(bench: Bench, turn: int) -> None:
    """Tokens/s over slow links, and over the same switch without delay: by schedule, and with the learner on both sides
    of a link."""
    compare(bench, turn, "wan", [0])
    compare(bench, turn, "wan_continuous", [0], schedule__kind="continuous")
    compare(bench, turn, "wan_spanning", [0, HOSTS - 1])


def compare(bench: Bench, turn: int, name: str, learner: list[int], **changes: object) -> None:
    """Speeds over slow links and fast ones, with the learner's ranks on these hosts, the broker on the first and the
    worker on the last."""
    speeds = {}
    for delay_s in sorted((0.0, DELAY_S), reverse=bool(turn % 2)):
        with bench.run(Link(delay_s), **bench.quickstart(), **changes) as run:
            run.learner(learner)
            run.wait(LONGEST_S)
            speeds[delay_s] = tokens_per_s(run.steps()[UNCOUNTED:])
        bench.note(f"{name}_{'far' if delay_s else 'near'}_tokens_per_s", speeds[delay_s])
    bench.note(f"{name}_throughput_ratio", speeds[DELAY_S] / speeds[0.0])


def tokens_per_s(steps: list[dict]) -> float:
    return sum(step["tokens"] for step in steps[1:]) / sum(b["time"] - a["time"] for a, b in pairwise(steps))


def join(bench: Bench, turn: int) -> None:
    """A worker is started beside a run that is under way."""
    with bench.run(schedule__max_steps=100_000, data__epochs=100_000) as run:
        run.learner([1, 2])
        wait_until(lambda: len(run.steps()) > UNCOUNTED, timeout_s=LONGEST_S)
        started = time.time()
        run.join("worker", 0, "late")
        wait_until(lambda: first_lease(run) > 0, timeout_s=LONGEST_S)
        bench.note("join_to_first_lease_s", first_lease(run) - started)
        run.processes["broker"].terminate()
        run.wait(LONGEST_S)


def first_lease(run: Parts) -> float:
    """When the late worker began to generate (Unix seconds); 0 as long as no step that is over says so."""
    lanes = (lane for step in run.steps() for lane in step["lanes"])
    return min((lane["start"] for lane in lanes if lane["worker"] == "late" and lane["kind"] == "generate"), default=0)


def requeue(bench: Bench, turn: int) -> None:
    """Slurm's job of broker and learner is queued again, and its two minutes of waiting are cut short."""
    options = bench.options(
        schedule__max_steps=100_000, data__epochs=100_000, launch__on="slurm", launch__learner_nodes=2,
        launch__cores=1, launch__memory_gb=2, learner__checkpoint_every=5,
    )  # fmt: skip
    run_dir = bench.folder / str(options["run.name"])
    words = [str(bench.config_file), *(f"--{key}={value}" for key, value in options.items())]
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as state,
        harness.hosts(HOSTS, Path(state)) as made,
        harness.slurm(made) as environment,
    ):
        cluster = first_host_commands(made, environment)
        cluster(*APRIL, "launch", *words)
        job = orjson.loads((run_dir / "launch/submitted.json").read_bytes())["main"]
        run = Parts(made, Path(), run_dir, {})
        wait_until(lambda: len(run.steps()) >= SLURM_STEPS, timeout_s=LONGEST_S)
        asked = time.time()
        cluster("scontrol", "requeue", job)
        wait_until(lambda: "PENDING" in cluster("squeue", "--noheader", f"--jobs={job}", "--format=%T"))
        before = len(run.steps())
        cluster("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until(lambda: len(run.steps()) > before, timeout_s=LONGEST_S)
        bench.note("requeue_to_training_s", run.steps()[before]["time"] - asked)
        cluster(*APRIL, "launch", "stop", str(run_dir))
        wait_until(lambda: not cluster("squeue", "--noheader"), timeout_s=LONGEST_S)


def first_host_commands(made: Hosts, environment: dict[str, str]) -> Callable[..., str]:
    """A function that runs a command on the first host and returns its output; it ends the benchmark on an error."""

    def ask(*command: str) -> str:
        told = subprocess.run(made.command(0, *command), env=environment, capture_output=True, text=True)
        if told.returncode:
            sys.exit(f"{' '.join(command)} ended with status {told.returncode}:\n{told.stdout}{told.stderr}")
        return told.stdout

    return ask


PIECES = {"two_nodes": two_nodes, "wan": wan, "join": join, "requeue": requeue}


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--only", choices=PIECES, action="append", help="one of its pieces; may be given again")
    options = arguments.parse_args()
    if not harness.has_slurm():
        sys.exit("hosts.py makes hosts and a Slurm on them, and needs root for it; launch/install-slurm.sh brings it")
    os.environ["PYTHONPATH"] = str(ROOT)
    repeats = 1 if options.quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="april-hosts-") as made:
        bench = Bench(Path(made), options.quick)
        for turn in range(repeats):
            for name in options.only or PIECES:
                PIECES[name](bench, turn)
    rows = [
        Row(name, values, "ratio" if name.endswith("ratio") else "tokens/s" if name.endswith("per_s") else "s")
        for name, values in bench.measured.items()
    ]
    report(rows, options.json)


if __name__ == "__main__":
    main()
