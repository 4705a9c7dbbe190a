"""Whether runs whose parts are killed learn as others do: the quickstart with SIGKILLs to learner, worker and broker.

Each seed is run twice, once left alone, and once with a learner rank, a worker, the broker and a rank again killed,
each after so many batches. Rewards and held-out accuracy are compared seed by seed.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import signal
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

import torch
from common import Row, parser, quickstart_policy, report
from end_to_end import SEEDS
from learning import AS_IT_IS, HELD_OUT, STEPS, Outcome, end_reward, gap_rows, train

from april.data.arithmetic import make_data
from april.observe.report.run_folder import read_records

KILLS = ((4, "april.learner "), (8, "april.cli worker"), (12, "april.cli broker"), (16, "april.learner "))
"""(batches after which it is killed, part of the killed process' command line)"""
LOOK_S = 0.05


class Killer(Thread):
    """Kills a run's processes as its batches are trained."""

    def __init__(self, run_dir: Path, kills: tuple[tuple[int, str], ...]):
        super().__init__(daemon=True)
        self.run_dir, self.kills = run_dir, kills
        self.over = Event()
        self.killed = 0

    def run(self) -> None:
        for batches, part in self.kills:
            while self.trained() < batches or not (found := self.processes(part)):
                if self.over.wait(LOOK_S):
                    return
            os.kill(found[-1], signal.SIGKILL)
            self.killed += 1

    def trained(self) -> int:
        return len(read_records(self.run_dir / "metrics.jsonl"))

    def processes(self, part: str) -> list[int]:
        """Processes of the run whose command line contains `part`, by age."""
        found = []
        for process in sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
            try:
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if part in command and str(self.run_dir) in command:
                found.append(process)
        return found


def rows_of(pairs: list[tuple[Outcome, Outcome]], killed: list[int]) -> list[Row]:
    """Rows of the pairs (left alone, killed), one a seed."""
    rows = [Row("kills", killed, "kills")]
    for measure, of, unit in (
        ("reward_at_end", end_reward, "reward"),
        ("heldout", lambda run: run.held_out, "accuracy"),
    ):
        gaps = [of(alone) - of(hit) for alone, hit in pairs]
        rows += [
            Row(f"{measure}_left_alone", [of(alone) for alone, _ in pairs], unit, of=fmean),
            Row(f"{measure}_killed", [of(hit) for _, hit in pairs], unit, of=fmean),
            *gap_rows(f"{measure}_gap", gaps, unit, two_sided=True),
        ]
    return rows


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="at least 2, for the spread between them")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    steps, seeds, held_out, kills, keys = options.steps, options.seeds, HELD_OUT, KILLS, {}
    if options.quick:
        steps, seeds, held_out, kills = 6, 2, 64, ((1, "april.learner "), (3, "april.cli worker"))
        keys = {"sampling.max_response_tokens": 64}
    if kills[-1][0] >= steps:
        arguments.error(f"--steps {steps}: the last kill comes after {kills[-1][0]} batches; take more steps")
    keys["schedule.max_steps"] = steps
    pairs, killed = [], []
    with tempfile.TemporaryDirectory(prefix="april-killed-") as made:
        folder = Path(made)
        policy = quickstart_policy(folder, options.quick)
        prompts, _ = make_data(folder / "data")
        for seed in range(seeds):
            runs = {}
            for name in ("alone", "killed") if seed % 2 else ("killed", "alone"):
                of_run = folder / name
                of_run.mkdir(exist_ok=True)
                killer = Killer(of_run / f"april-{seed}", kills if name == "killed" else ())
                killer.start()
                runs[name] = train(of_run, policy, prompts, AS_IT_IS, "april", seed, keys, held_out)
                killer.over.set()
                killer.join()
                if name == "killed":
                    killed.append(killer.killed)
            pairs.append((runs["alone"], runs["killed"]))
            ends = [f"{name} {end_reward(run):.3f}, held out {run.held_out:.4f}" for name, run in runs.items()]
            print(f"seed {seed}: {' and '.join(ends)}; {killed[-1]} kills", file=sys.stderr, flush=True)
    report(rows_of(pairs, killed), options.json)


if __name__ == "__main__":
    main()
