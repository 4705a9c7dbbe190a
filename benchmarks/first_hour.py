"""The first hour of somebody who has a model, data and a reward: what the pages say, typed into an empty folder.

Each step is a command, and what must be printed or written; `friction_free` is the share that succeeds at the first
try. `time_to_first_step_s` is from the command to the line of step 1; beside it the processor time of all processes
until then, which other work on the machine changes less. Then everything is done wrong, once each: a refusal is one
sentence with key, value and mend. Exits with status 1 where a step fails or a refusal is none.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import Row, parser, report
from misuses import FILES, MISUSES, Misuse
from stranger import CONFIG, REWARDS, make_data, make_model

APRIL = [sys.executable, "-m", "april.cli"]
RUNS = 3
"""that the time to the first step is the median of"""
LIMIT_S = 300.0
"""for a command; one that takes longer has failed"""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Step:
    """What is typed, and what must come of it."""

    name: str
    command: list[str]
    prints: tuple[str, ...] = ()
    """regular expressions that its output has to match"""
    writes: tuple[str, ...] = ()
    """files that must be there then"""
    status: int = 0
    at_first_step: Callable[[int], None] | None = None
    """done to the process of that id when the line of step 1 is there"""


@dataclass
class Done:
    """A command that has ended."""

    status: int
    output: str
    first_step_s: float | None = None
    processor_s: float = 0.0
    """of all its processes until the line of step 1"""

    def objection(self, step: Step, folder: Path) -> str:
        unseen = [wanted for wanted in step.prints if not re.search(wanted, self.output, re.MULTILINE)]
        missing = [path for path in step.writes if not list(folder.glob(path))]
        if self.status != step.status:
            return f"ended with status {self.status}"
        if "Traceback" in self.output:
            return "printed a traceback"
        return f"did not print {unseen}" if unseen else f"did not write {missing}" if missing else ""


def april(name: str, words: str, *prints: str, **more) -> Step:
    return Step(name, [*APRIL, *words.split(" ")], prints, **more)


def python(name: str, code: str, *prints: str) -> Step:
    return Step(name, [sys.executable, "-c", code], prints)


def shell(name: str, line: str, *prints: str) -> Step:
    return Step(name, ["bash", "-c", line.replace("april ", f"{sys.executable} -m april.cli ")], prints)


def interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def kill_a_worker(pid: int) -> None:
    worker = next(one for one in family(pid) if "--name worker-0" in command_of(one))
    os.kill(worker, signal.SIGKILL)


LOAD_POLICY = (
    "from transformers import AutoModelForCausalLM as M; "
    "print(M.from_pretrained('runs/mine/checkpoints/policy').num_parameters(), 'parameters')"
)
READ_RUN = (
    "from april import runs; run = runs.load('runs/mine'); print(len(run.steps), 'steps'); "
    "print(len(run.samples(2)), 'samples')"
)
STEPS = [
    april("the version", "--version", r"^april \d"),
    april("the commands", "--help", "run .*train", "report", "samples"),
    april("the keys", "run --help", "learner.lr", "schedule.rollout_batch_size"),
    april("a dry run", "run my.toml --dry-run", "nothing is missing"),
    april(
        "a run", "run my.toml", "^plan: april", "starting broker", "step 1/3 .*reward", "step 3/3", "mine  finished",
        "ledger +closed", "report: .*runs/mine/report.html", writes=("runs/mine/checkpoints/policy/*.safetensors",),
    ),
    april("its state", "status runs/mine", "run mine  finished", "3 of 3", "ledger +closed"),
    april("its report", "report runs/mine", "runs/mine/report.html", writes=("runs/mine/report.html",)),
    april("its samples", "samples runs/mine", "colour"),
    april("the worst of a step", "samples runs/mine --step 2 --worst 2", "step 2", "colour"),
    shell("what the reward is made of", "tail -1 runs/mine/metrics.jsonl | python3 -m json.tool", '"brief": -'),
    shell("steps are counted alike", "cat runs/mine/logs/*.log", "step 3 trained: reward", "step 3 trained in"),
    shell("the ledger in the summary", "cat runs/mine/summary.json", '"ledger_closed": true', '"steps": 3'),
    python("a notebook", READ_RUN, "^3 steps", r"^\d+ samples"),
    python("the trained model", LOAD_POLICY, r"\d+ parameters"),
    april("more steps", "run my.toml --resume --schedule.max_steps 5", r"max_steps: 3 -> 5", "step 5/5", "finished"),
    april("a name that is taken", "run my.toml --schedule.kind continuous", "run mine-2  finished"),
    april("another schedule", "run my.toml --run.name all --schedule.kind sync --over-sampling-batch-size 4", "step 3"),
    april("held-out prompts", "run my.toml --run.name eval --data.eval_path heldout.jsonl", "held-out accuracy"),
    shell("evaluations by step", "grep evaluation runs/eval/metrics.jsonl", '"step":0,.*"accuracy":', '"step":3,'),
    Step("a name with spaces", [*APRIL, "run", "my.toml", "--run.name", "my first run"], ("my first run  finished",)),
    april("another reward", "run my.toml --run.name brief --data.reward my_rewards:brief", "step 3/3", "finished"),
    april(
        "Ctrl-C", "run my.toml --run.name long --schedule.max_steps 5000", "stopping: what is acknowledged is kept",
        "run long  stopped", status=130, at_first_step=interrupt,
    ),
    april("going on", "run my.toml --run.name long --resume --schedule.max_steps 60", "5000 -> 60", "step 60/60"),
    april(
        "a worker that dies", "run my.toml --run.name killed --schedule.max_steps 80",
        "worker-0 ended with status -9; restart 1 of", "finished", at_first_step=kill_a_worker,
    ),
    shell("dead letters, piped", "april dead-letters runs/mine | cat", "no dead letters"),
    april(
        "a reward that fails on some labels", "run my.toml --run.name fails --data.reward my_rewards:fails",
        "scoring: .*failed, KeyError", "reward.max_failed_share", status=4,
    ),
    shell("and why", "april dead-letters runs/fails | cat", "KeyError"),
    april("lengths as a trace", "trace runs/mine --out lengths.jsonl", writes=("lengths.jsonl",)),
    april("keys for two machines", "keygen keys", writes=("keys/broker.key", "keys/worker.key")),
    april("two files", "run my.toml more.toml --dry-run", "nothing is missing"),
]  # fmt: skip


def main() -> None:
    options = parser(__doc__).parse_args()
    rows, fine = [], True
    with tempfile.TemporaryDirectory(prefix="april-first-hour-") as name:
        folder = Path(name)
        settle(folder)
        objections = take(folder, STEPS)
        rows.append(Row("friction_free", [1 - len(objections) / len(STEPS)], f"share of {len(STEPS)} steps"))
        runs = [measure(folder, number) for number in range(1 if options.quick else RUNS)]
        rows.append(Row("time_to_first_step_s", [run.first_step_s or LIMIT_S for run in runs], "s"))
        rows.append(Row("processor_to_first_step_s", [run.processor_s for run in runs], "s of processor time"))
        misuses = MISUSES[::6] if options.quick else MISUSES
        refused = refuse(folder, misuses)
        rows.append(Row("refusals_in_one_sentence", [1 - len(refused) / len(misuses)], f"share of {len(misuses)}"))
        fine = not objections and not refused
        for line in (*objections, *refused):
            print(line, file=sys.stderr)
    load = os.getloadavg()[1]
    report(rows, options.json, {"objections": [*objections, *refused]}, load_of_five_minutes=load)
    sys.exit(0 if fine else 1)


def settle(folder: Path) -> None:
    """What the newcomer brings."""
    model = make_model(folder / "model")
    for lacking, kept in (("no_weights", "*.json"), ("no_tokenizer", "[!t]*")):
        (folder / lacking).mkdir()
        for file in model.glob(kept):
            shutil.copy(file, folder / lacking)
    make_data(folder / "train.jsonl", 200)
    make_data(folder / "heldout.jsonl", 8)
    own = {"my.toml": CONFIG, "my_rewards.py": REWARDS, "more.toml": "[learner]\nlr = 1e-5\n"}
    for name, text in (own | FILES).items():
        (folder / name).write_text(text)


def take(folder: Path, steps: list[Step]) -> list[str]:
    """Every step once, one after the other; what was wrong, a line each."""
    objections = []
    for number, step in enumerate(steps, start=1):
        done = run(step, folder)
        wrong = done.objection(step, folder)
        print(f"{number:2} {'FAILED' if wrong else 'ok':6} {step.name}", flush=True)
        if wrong:
            objections.append(f"step {number}, {step.name}: {wrong}")
            print("     " + "\n     ".join(done.output.splitlines()[-20:]), file=sys.stderr)
    return objections


def measure(folder: Path, number: int) -> Done:
    """A run of its own, alone on the machine as far as this benchmark goes."""
    return run(april("a run", f"run my.toml --run.name timed-{number} --schedule.max_steps 1"), folder)


def run(step: Step, folder: Path) -> Done:
    """Type it, and wait for its end."""
    began, lines, done = time.monotonic(), [], Done(0, "")
    process = subprocess.Popen(
        step.command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    spent: dict[int, float] = {}
    over = threading.Event()
    threading.Thread(target=watch_processors, args=(process.pid, spent, over), daemon=True).start()
    overdue = threading.Timer(LIMIT_S, end, [process])
    overdue.start()
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 1/"):
            done.first_step_s = time.monotonic() - began
            spend(process.pid, spent)
            done.processor_s = sum(spent.values())
            over.set()
            if step.at_first_step:
                step.at_first_step(process.pid)
    done.status, done.output = process.wait(), "".join(lines)
    over.set()
    overdue.cancel()
    return done


def end(process: subprocess.Popen) -> None:
    """It and everything that it has started."""
    for pid in reversed(family(process.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def watch_processors(pid: int, spent: dict[int, float], over: threading.Event) -> None:
    while not over.wait(0.1):
        spend(pid, spent)


def spend(pid: int, spent: dict[int, float]) -> None:
    """Write down how much processor time each process of the family has used so far (seconds)."""
    for one in family(pid):
        try:
            facts = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        spent[one] = (int(facts[11]) + int(facts[12])) / TICKS


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def refuse(folder: Path, misuses: list[Misuse]) -> list[str]:
    """Do everything wrong once; the refusals that are none, a line each."""

    def attempt(misuse: Misuse) -> str:
        done = run(Step("", [*APRIL, *misuse.command]), folder)
        wrong = misuse.objection(done.status, done.output)
        return f"april {' '.join(misuse.command)}: {wrong}: {done.output.strip()[:400]!r}" if wrong else ""

    with ThreadPoolExecutor(2) as two_at_a_time:
        return [line for line in two_at_a_time.map(attempt, misuses) if line]


if __name__ == "__main__":
    main()
