"""Does it run: the quickstart's task through `april run` on one accelerator, which learner and engine share.

Once they divide its memory, and a worker and the learner are killed (SIGKILL) in the middle; once they take turns. The
policy and the prompts are those of `april quickstart`, the engine is the embedded one.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from threading import Event, Thread

from part import Part  # puts april and the harness on sys.path

# isort: split
import orjson
from common import APRIL, ROOT, python_path, quickstart_policy

from april.data.arithmetic import make_data
from april.observe.report.run_folder import read_records
from april.util.lifetime import end_with_parent

LEARNER, WORKER = "-m april.learner ", "-m april.cli worker"
"""Parts of the command lines of a learner rank and of a worker."""
FINISHED, LATE, FAILED = "finished", "out of time", "failed"
"""What becomes of a run."""
LOOK_S = 0.05
LEAVE_S = 9.0
"""Seconds in which a run that is interrupted ends by itself, before it is killed."""
BESIDE_S, BRIEF_S = 240.0, 75.0
"""With fewer seconds than these both runs are beside each other, and then also short: starting takes most of a run."""
START_S = 15.0
"""Seconds without which no run is begun."""
DIVIDED_SHARE = 0.68
"""Share of the time for the run that divides the memory, in which two parts are killed."""
ENOUGH_STEPS = 16
"""Steps after which the quickstart's policy answers nine of ten held-out prompts."""
LOG_CHARACTERS = 2500
AVERAGED = ("turn_wait_s", "turn_move_s", "train_s", "wait_s", "publish_s", "k3")
"""Keys of the learner's records of which the means are reported."""


@dataclass(frozen=True)
class Sharing:
    """One way of sharing the accelerator."""

    name: str
    keys: dict[str, object]
    steps: int
    kills: tuple[tuple[int, str], ...] = ()
    """(steps after which it is killed, part of the killed process' command line)"""


@dataclass
class Killer(Thread):
    """Kills a run's processes as its steps are trained."""

    run_dir: Path
    kills: tuple[tuple[int, str], ...]
    killed: list[str] = field(default_factory=list)
    over: Event = field(default_factory=Event)

    def __post_init__(self):
        super().__init__(daemon=True)

    def __hash__(self):
        return id(self)

    def run(self) -> None:
        for steps, part in self.kills:
            while len(read_records(self.run_dir / "metrics.jsonl")) < steps or not (found := self.processes(part)):
                if self.over.wait(LOOK_S):
                    return
            os.kill(found[-1], signal.SIGKILL)
            self.killed.append(f"{part.split('.')[-1].strip()} after step {steps}")

    def processes(self, part: str) -> list[int]:
        """Processes of this run whose command line contains `part`."""
        found = []
        for process in sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
            try:
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if part in command and str(self.run_dir) in command:
                found.append(process)
        return found


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n")[0])
    brief = part.left_s < BRIEF_S
    kills = ((1, WORKER),) if brief else ((1, WORKER), (2, LEARNER)) if part.tiny else ((3, LEARNER), (8, WORKER))
    few = part.tiny or brief
    divided = Sharing("divided", {}, 4 if few else 20, kills)
    turns = Sharing("turns", {"devices.turns": True}, 3 if few else 12)
    with tempfile.TemporaryDirectory(prefix="april-gpu-") as made:
        folder = Path(made)
        policy = quickstart_policy(folder, quick=part.tiny and not (ROOT / "cache/policy").exists())
        prompts, held_out = make_data(folder / "data")
        inputs = {"model.path": policy, "data.path": prompts, "data.eval_path": held_out, "run.dir": folder}
        if part.left_s < BESIDE_S:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda sharing: attempt(part, sharing, inputs, 1.0), (divided, turns)))
            return
        if attempt(part, divided, inputs, DIVIDED_SHARE) == FAILED:
            attempt(part, Sharing("divided_fp32", {"learner.compute": "fp32"}, divided.steps), inputs, 0.5)
        attempt(part, turns, inputs, 1.0)


def attempt(part: Part, sharing: Sharing, inputs: dict[str, object], share_of_time: float) -> str:
    """Run once within this share of the time that is left; returns what became of it."""
    with part.attempt(sharing.name):
        if not part.enough_time(sharing.name, START_S):
            return LATE
        return share(part, sharing, inputs, part.left_s * share_of_time)
    return FAILED


def keys_of(part: Part, sharing: Sharing) -> dict[str, object]:
    """Keys beside those of configs/quickstart.toml."""
    device = part.device.type
    keys = {
        "run.name": sharing.name, "devices.share": True, "schedule.max_steps": sharing.steps,
        "worker.count": 1, "worker.slots": 128, "worker.device": device,
        "learner.ranks": 1, "learner.device": device, "learner.checkpoint_every": 4, "evaluation.every": ENOUGH_STEPS,
    }  # fmt: skip
    if part.tiny:
        keys |= {
            "sampling.max_response_tokens": 48, "evaluation.prompts": 16, "worker.slots": 32,
            "schedule.rollout_batch_size": 4, "schedule.over_sampling_batch_size": 6,
        }  # fmt: skip
    return keys | sharing.keys


def share(part: Part, sharing: Sharing, inputs: dict[str, object], seconds: float) -> str:
    """Run once, record and return what became of it; it has left after `seconds`."""
    words = [word for key, value in (inputs | keys_of(part, sharing)).items() for word in (f"--{key}", str(value))]
    words = [word.lower() if word in ("True", "False") else word for word in words]
    command = [*APRIL, "run", str(ROOT / "configs/quickstart.toml"), *words]
    environment = os.environ | {"PYTHONPATH": python_path()} | ({"OMP_NUM_THREADS": "1"} if part.tiny else {})
    run_dir = Path(str(inputs["run.dir"])) / sharing.name
    output = run_dir.with_suffix(".log")
    killer, started = Killer(run_dir, sharing.kills), time.time()
    with output.open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT, preexec_fn=end_with_parent)
    killer.start()
    outcome = LATE
    try:
        outcome = FAILED if run.wait(seconds - min(LEAVE_S, seconds / 4)) else FINISHED
    except subprocess.TimeoutExpired:
        if end(run) == 0:  # it was about to
            outcome = FINISHED
    finally:
        killer.over.set()
        killer.join()
        run.kill()
    text = output.read_text(errors="replace")
    part.fact(f"{sharing.name}: restarts", [line for line in text.splitlines() if "; restart " in line])
    if outcome != FINISHED:
        part.fact(f"{sharing.name}: failed", f"{outcome}, status {run.wait()}")
        for log in (output, *sorted((run_dir / "logs").glob("*.log"))):
            part.fact(f"{sharing.name}: end of {log.name}", log.read_text(errors="replace")[-LOG_CHARACTERS:])
    record(part, sharing, run_dir, started, killer.killed)
    return outcome


def end(run: subprocess.Popen) -> int | None:
    """Interrupt a run that takes too long; returns its status, None if it does not leave."""
    run.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return run.wait(LEAVE_S - 2)
    return None


def record(part: Part, sharing: Sharing, run_dir: Path, started: float, killed: list[str]) -> None:
    """Rows and facts of a run that has ended, from its summary and its metrics."""
    steps = read_records(run_dir / "metrics.jsonl")
    name = "gpu_quickstart" if sharing.name == "divided" else f"gpu_{sharing.name}"
    part.fact(f"{sharing.name}: killed", killed)
    part.fact(f"{sharing.name}: steps", f"{len(steps)} of {sharing.steps}")
    if steps:
        part.row(f"{name}_first_step_s", steps[0]["time"] - started, "s")
        part.row(f"{name}_rollout_tokens_per_s", [step["rollout_tokens_per_s"] for step in steps], "tokens/s")
    if len(steps) > 1:
        gaps = [after["time"] - before["time"] for before, after in pairwise(steps)]
        part.row(f"{name}_steps_per_s", 1 / median(gaps), "steps/s")
        learner = [step["learner"] for step in steps]
        means = {key: fmean(each[key] for each in learner) for key in AVERAGED if all(key in each for each in learner)}
        part.fact(f"{sharing.name}: means of a step", {key: round(mean, 6) for key, mean in means.items()})
    alarms = sorted({alarm["name"] for step in steps for alarm in step["alarms"]})
    part.fact(f"{sharing.name}: alarms", alarms)
    if not (run_dir / "summary.json").exists():
        return part.fact(f"{sharing.name}: state", "no summary was written")
    summary = orjson.loads((run_dir / "summary.json").read_bytes())
    tokens = summary["tokens"]
    parts = sum(tokens[state] for state in ("trained", "delivered", "ready", "open")) + sum(
        tokens["discarded"].values()
    )
    closed = summary["ledger_closed"] and tokens["generated"] == parts > 0
    ledger = "gpu_ledger_closed" if sharing.name == "divided" else f"{name}_ledger_closed"
    part.row(ledger, float(closed), "1 or 0")
    part.fact(f"{sharing.name}: state", summary["state"])
    # Of an evaluation that a kill has cut short no accuracy is known.
    accuracies = {each["step"]: each["accuracy"] for each in summary["evaluation"]}
    part.fact(f"{sharing.name}: accuracies by step", list(accuracies.items()))
    known = [step for step, accuracy in accuracies.items() if accuracy is not None]
    if 0 in known:
        part.row(f"{name}_heldout_first", accuracies[0], "accuracy")
    if last := max(known, default=0):
        # A run of a few steps has no figure to be compared with the goal.
        complete = part.tiny or last >= ENOUGH_STEPS
        part.row(f"{name}_heldout" if complete else f"{name}_heldout_early", accuracies[last], "accuracy")


if __name__ == "__main__":
    main()
