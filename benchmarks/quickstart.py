"""The quickstart as a new user meets it: a fresh clone, the one command, then five seeds.

Times the set-up with its installation, the same when everything is installed but no policy is made. Rewards, accuracies
and lengths are those of the runs' own summaries; every alarm is a false one. Exits with status 1 if a run fails or a
ledger is open.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
from common import ROOT, Row, parser, report

from april.observe.report.run_folder import read_records

SEEDS = (0, 1, 2, 3, 4)


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="april-quickstart-") as folder:
        clone = Path(folder) / "april"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        rows = measure(clone, SEEDS[:1] if options.quick else SEEDS)
    report(rows, options.json)


def measure(clone: Path, seeds: tuple[int, ...]) -> list[Row]:
    fresh_s = timed(clone, ["bash", "launch/quickstart.sh", "--seed", str(seeds[0]), "--run.name", "fresh"])
    shutil.rmtree(clone / "cache")
    installed_s = timed(
        clone, ["bash", "launch/quickstart.sh", "--seed", str(seeds[0]), "--run.name", f"seed{seeds[0]}"]
    )
    for seed in seeds[1:]:
        april = str(clone / ".venv/bin/april")
        timed(clone, [april, "run", "configs/quickstart.toml", "--seed", str(seed), "--run.name", f"seed{seed}"])
    policy = orjson.loads((clone / "cache/policy/warm_start.json").read_bytes())
    summaries = [summary(clone / "runs" / f"seed{seed}") for seed in seeds]
    return [
        Row("quickstart_fresh_s", [fresh_s], "s"),
        Row("quickstart_installed_s", [installed_s], "s"),
        Row("make_policy_s", [policy["seconds"]], "s"),
        Row("run_s", [each["wall_s"] for each in summaries], "s"),
        Row("reward_first", [each["reward"]["first"] for each in summaries], "reward"),
        Row("reward_last3", [each["reward"]["last3"] for each in summaries], "reward"),
        Row("heldout_first", [each["evaluation"][0]["accuracy"] for each in summaries], "accuracy"),
        Row("heldout_last", [each["evaluation"][-1]["accuracy"] for each in summaries], "accuracy"),
        Row("length_p99_over_median", [tail(each) for each in summaries], "ratio"),
        Row("rollout_tokens_per_s", [each["rollout_tokens_per_s"] for each in summaries], "tokens/s"),
        Row("staleness_mean", [each["staleness"]["mean"] for each in summaries], "steps"),
        Row("false_alarms", [alarms(clone / "runs" / f"seed{seed}") for seed in seeds], "alarms", of=sum),
    ]


def timed(clone: Path, command: list[str]) -> float:
    started = time.monotonic()
    done = subprocess.run(command, cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - started


def summary(run_dir: Path) -> dict:
    found = orjson.loads((run_dir / "summary.json").read_bytes())
    tokens = found["tokens"]
    parts = sum(tokens[state] for state in ("trained", "delivered", "ready", "open")) + sum(
        tokens["discarded"].values()
    )
    if found["state"] != "finished" or tokens["generated"] != parts:
        sys.exit(f"{run_dir.name}: state {found['state']}, {tokens['generated']} generated, {parts} accounted for")
    return found


def alarms(run_dir: Path) -> int:
    """Print the alarms of a run in which nothing is wrong, and return their number."""
    steps = read_records(run_dir / "metrics.jsonl")
    raised = [(step["step"], alarm) for step in steps for alarm in step["alarms"]]
    for step, alarm in raised:
        print(f"{run_dir.name}, step {step}: {alarm['name']}: {alarm['sentence']}", file=sys.stderr)
    return len(raised)


def tail(summary: dict) -> float:
    created = summary["lengths"]["created"]
    return created["p99"] / created["p50"]


if __name__ == "__main__":
    main()
