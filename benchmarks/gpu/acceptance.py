"""The GPU acceptance: one command that measures everything on a card in a few minutes, and comes back with the figures.

    python benchmarks/gpu/acceptance.py --minutes 8 --json gpu.json
    python benchmarks/gpu/acceptance.py --minutes 4 --json gpu.json --device cpu --tiny      # a rehearsal

Each part is a script of its own, in a process of its own, with its own limit; what it leaves unused goes to the later
ones. The JSON file is complete whenever it is read: it is replaced every few seconds, also while a part runs. A part
that fails or hangs is a result; its log lies beside the file. Exits with status 1 if anything failed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]  # april, which need not be installed, and its harness

import orjson  # noqa: E402
from common import commit, installed, machine, short  # noqa: E402

from april.util.lifetime import end_with_parent  # noqa: E402

MARK, STARTED = "APRIL_GPU_PART", "APRIL_GPU_STARTED_S"
"""Environment variables: a mark by which all processes of a part are found, whatever session they have made their own;
when the part was started, from which its seconds count."""
LOOK_S, WRITE_S = 0.1, 2.0
"""Seconds between looks at a part's process, and between versions of the JSON file."""
LEAVE_S = 3.0
"""Seconds in which a part that has used up its limit may leave, before it is killed."""
END_S = 2.0
"""Seconds of all that are kept for the end."""
LOG_CHARACTERS = 4000
TABLE_CHARACTERS, LINE_CHARACTERS = 9000, 150
FAILURES = (": failed", ": out of memory")
"""Ends of the names of facts that are failed attempts, see `Part.attempt`."""
ASK_TORCH = """
import torch
card = torch.cuda.get_device_properties(0)
print(f"{card.name}, {card.total_memory >> 20} MiB, unknown")
"""


@dataclass(frozen=True)
class Plan:
    """A part of the acceptance."""

    name: str
    script: str
    minutes: float
    """Its share of the time, of 8 minutes in all."""
    least_s: float = 22.0
    """Seconds that it gets however short the whole is, as far as they suffice: it takes some to start."""


PLANS = (
    Plan("run", "start_run.py", 2, least_s=55.0), Plan("learner", "learner_step.py", 2.4),
    Plan("engine", "engine_decode.py", 1.9), Plan("claim", "claim.py", 2.4, least_s=36.0),
    Plan("band", "band.py", 0.5), Plan("weights", "weight_lane.py", 0.5),
)  # fmt: skip


@dataclass
class Outcome:
    """What became of a part."""

    name: str
    status: str = "running"
    """running, done, failed, out of time, or not built."""
    seconds: float = 0.0
    limit_s: float = 0.0
    rows: list[dict] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    tail: str = ""
    """End of the log of a part that was not done."""

    @property
    def failures(self) -> list[str]:
        return [name for name in self.facts if name.endswith(FAILURES)]

    @property
    def has_failed(self) -> bool:
        return bool(self.failures) or self.status in ("failed", "out of time")

    def read(self, lines: Path) -> None:
        """Take over the rows and facts that the part has written so far."""
        self.rows, self.facts = [], {}
        for line in lines.read_bytes().splitlines(keepends=True) if lines.exists() else ():
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # still being written
            if "fact" not in found:
                self.rows.append(found)
                continue
            name, number = found["fact"], 2
            while name in self.facts:
                name, number = f"{found['fact']} ({number})", number + 1
            self.facts[name] = found["value"]

    def to_json(self) -> dict:
        return {
            "part": self.name, "status": self.status, "failures": self.failures, "seconds": round(self.seconds, 1),
            "limit_s": round(self.limit_s, 1), "facts": self.facts, "log": self.tail,
        }  # fmt: skip


class Acceptance:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.ends_s = time.monotonic() + 60 * options.minutes - END_S
        self.folder = Path(tempfile.mkdtemp(prefix="april-acceptance-"))
        self.outcomes: list[Outcome] = []
        self.head = {"machine": machine() | card(options.device), "commit": commit()}
        self.written_s = 0.0

    def run(self) -> None:
        """Run all parts that are asked for, in the order of their worth."""
        plans = [plan for plan in PLANS if not self.options.parts or plan.name in self.options.parts]
        built = [plan for plan in plans if (self.options.folder / plan.script).exists()]
        for plan in plans:
            outcome = Outcome(plan.name, status="running" if plan in built else "not built")
            self.outcomes.append(outcome)
            if plan in built:
                left = self.ends_s - time.monotonic()
                outcome.limit_s = limit_s(plan, built[built.index(plan) :], left, self.options.tiny)
                self.run_part(plan, outcome)
            self.write()
            print(f"{outcome.name}: {describe(outcome)}", flush=True)

    def run_part(self, plan: Plan, outcome: Outcome) -> None:
        lines, log, mark = self.folder / f"{plan.name}.jsonl", self.log_of(plan.name), uuid.uuid4().hex
        command = [sys.executable, str(self.options.folder / plan.script), "--device", self.options.device]
        command += ["--tiny"] * self.options.tiny
        command += ["--seconds", f"{max(1.0, outcome.limit_s - LEAVE_S):.1f}", "--out", str(lines)]
        began = time.monotonic()
        variables = os.environ | {MARK: mark, STARTED: str(began)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables,
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - began < outcome.limit_s:
                time.sleep(LOOK_S)
                outcome.seconds = time.monotonic() - began
                if time.monotonic() - self.written_s > WRITE_S:
                    outcome.read(lines)
                    self.write()
            is_late = process.poll() is None
        except BaseException:
            outcome.status = "interrupted"
            raise
        finally:
            end(process, mark)
            outcome.seconds = time.monotonic() - began
            outcome.read(lines)
        outcome.status = "out of time" if is_late else "failed" if process.returncode else "done"
        if outcome.status != "done":
            outcome.tail = log.read_text(errors="replace")[-LOG_CHARACTERS:]

    def log_of(self, part: str) -> Path:
        return self.options.json.with_name(f"{self.options.json.stem}.{part}.log")

    def write(self) -> None:
        """Replace the JSON file by what is known now."""
        self.written_s = time.monotonic()
        rows = [row for outcome in self.outcomes for row in outcome.rows]
        result = self.head | {"rows": rows, "parts": [outcome.to_json() for outcome in self.outcomes]}
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        new = self.options.json.with_name(f".{self.options.json.name}.new")
        new.write_bytes(orjson.dumps(result, option=options))
        new.replace(self.options.json)


def limit_s(plan: Plan, later: list[Plan], left_s: float, tiny: bool) -> float:
    """Seconds for a part, the first of `later`, of those that are left for all of these.

    By their shares, but none gets less than its least where they suffice. A rehearsal takes what it needs.
    """
    least = sum(each.least_s for each in later)
    if tiny:
        return left_s - min(left_s, least - plan.least_s) / 2
    if least >= left_s:
        return left_s * plan.least_s / least
    by_share, free_s = list(later), left_s
    while small := [each for each in by_share if free_s * each.minutes / minutes_of(by_share) < each.least_s]:
        if plan in small:
            return plan.least_s
        by_share = [each for each in by_share if each not in small]
        free_s -= sum(each.least_s for each in small)
    return free_s * plan.minutes / minutes_of(by_share)


def minutes_of(plans: list[Plan]) -> float:
    return sum(plan.minutes for plan in plans)


def end(process: subprocess.Popen, mark: str) -> None:
    """Ask a part's process group to leave, then kill it and whatever process of the part is left."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for left in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    process.wait()


def processes_of(mark: str) -> list[int]:
    """Living processes that have inherited the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


# --- the machine and the end ------------------------------------------------------------------------------------------


def card(device: str) -> dict[str, str | None]:
    """Name, memory and driver of the first GPU, and the versions of what drives it."""
    facts = {"gpu": None, "gpu_memory": None, "driver": None}
    ask = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    for command in (ask, [sys.executable, "-c", ASK_TORCH]) if device == "cuda" else ():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
            if answer.count(", ") >= 2:
                facts = dict(zip(facts, answer.splitlines()[0].split(", "), strict=True))
                break
    return facts | {"triton": installed("triton"), "nccl": installed("nvidia-nccl-cu13")}


def describe(outcome: Outcome) -> str:
    parts = [outcome.status]
    if outcome.status != "not built":
        parts.append(f"{outcome.seconds:.0f} of {outcome.limit_s:.0f} s")
        parts.append(f"{len(outcome.rows)} rows")
    parts += outcome.failures
    return ", ".join(parts)


def table(acceptance: Acceptance) -> str:
    """All rows, then what failed, in few enough characters to be read off the end of an output."""
    lines = []
    for outcome in acceptance.outcomes:
        lines.append(f"{outcome.name}: {describe(outcome)}")
        for row in outcome.rows:
            spread = f"  ({short(row['min'])} to {short(row['max'])}, n {row['n']})" if row["n"] > 1 else ""
            lines.append(f"  {row['name']:<40} {short(row['value']):>9} {row['unit']}{spread}")
        for name in outcome.failures:
            lines += [f"  {name}", *(f"    {line}" for line in str(outcome.facts[name]).splitlines()[-3:])]
        lines += [f"    {line}" for line in outcome.tail.splitlines()[-6:]]
    text = "\n".join(line[:LINE_CHARACTERS] for line in lines)
    if len(text) > TABLE_CHARACTERS:
        text = f"{text[:TABLE_CHARACTERS]}\n… the rest is in {acceptance.options.json}"
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="in which everything ends [default: 8]")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the figures are written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="rehearse the code; the figures say nothing")
    parser.add_argument(
        "--parts", type=lambda names: names.split(","), default=[], metavar="NAMES",
        help=f"only these, with commas: {', '.join(plan.name for plan in PLANS)}",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=HERE, help="where the parts' scripts are [default: beside this]")
    given = parser.parse_args()
    if unknown := set(given.parts) - {plan.name for plan in PLANS}:
        parser.error(f"--parts {','.join(sorted(unknown))}: no such part")
    given.json = given.json.absolute()
    given.json.parent.mkdir(parents=True, exist_ok=True)
    return given


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    acceptance = Acceptance(arguments())
    acceptance.write()
    try:
        acceptance.run()
    finally:
        acceptance.write()
        print(table(acceptance), flush=True)
    sys.exit(any(outcome.has_failed for outcome in acceptance.outcomes))


if __name__ == "__main__":
    main()
