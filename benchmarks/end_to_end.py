"""`april run` against TRL's GRPOTrainer, end to end: generated-and-trained tokens/s, and time to a mean reward of 0.8.

Both from the start of their processes to the end of the last step, on the quickstart's policy, prompts and verifier,
with the same loss (April's tokens that are stale are corrected as by default, TRL has none), learning rate, samples a
step, sampling and fp32; lengths are long-tailed. The seeds are paired, and who goes first alternates.
"""

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import orjson
from common import (
    APRIL,
    ROOT,
    Row,
    execute,
    in_turns,
    parser,
    quickstart_policy,
    ratios,
    read_lines,
    read_runs,
    report,
    write_run,
)  # fmt: skip

from april import config as configuration
from april.data.arithmetic import make_data
from april.observe.report.run_folder import read_records

STEPS, SEEDS = 12, 5
REWARD = 0.8
WINDOW_STEPS = 3
"""Steps over which the reward is a mean."""
CORES = 2


@dataclass(frozen=True)
class Course:
    """Rewards of a run's steps, and when they ended (seconds, by default since its processes were started)."""

    seconds: list[float]
    rewards: list[float]
    tokens: int

    @classmethod
    def of_steps(cls, steps: list[dict], began: float) -> "Course":
        """From the records of steps; `began` in Unix seconds."""
        seconds = [step["time"] - began for step in steps]
        return cls(seconds, [step["reward"] for step in steps], sum(step["tokens"] for step in steps))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds[-1]

    def seconds_to(self, reward: float) -> float | None:
        """Until the mean over the last steps reaches `reward`; None if it never does."""
        for end in range(WINDOW_STEPS, len(self.rewards) + 1):
            if sum(self.rewards[end - WINDOW_STEPS : end]) / WINDOW_STEPS >= reward:
                return self.seconds[end - 1]
        return None


def ratio_of_times(ours: Course, theirs: Course, reward: float) -> float:
    """Seconds to that reward: infinite where ours does not reach it; their last second stands for one that they do
    not reach, so that the ratio is then too large."""
    reached = ours.seconds_to(reward)
    return inf if reached is None else reached / (theirs.seconds_to(reward) or theirs.seconds[-1])


def run_april(folder: Path, policy: Path, prompts: Path, seed: int, overrides: list[str]) -> Course:
    chosen = ["--run.dir", folder, "--run.name", f"april{seed}", "--seed", seed]
    chosen += ["--model.path", policy, "--data.path", prompts, *overrides]
    started = time.time()
    execute([*APRIL, "run", configuration_file(folder), *chosen], folder / f"april{seed}.log", threads=1)
    return Course.of_steps(read_records(folder / f"april{seed}/metrics.jsonl"), started)


def run_trl(folder: Path, policy: Path, prompts: Path, seed: int, overrides: list[str], threads: int = CORES) -> Course:
    config = configuration.load(
        configuration_file(folder), ["--model.path", str(policy), "--data.path", str(prompts), *overrides]
    )
    settings = {
        "policy": str(policy), "prompts": str(prompts), "seed": seed, "threads": threads,
        "groups": config.schedule.rollout_batch_size, "group_size": config.schedule.n_samples_per_prompt,
        "max_response_tokens": config.sampling.max_response_tokens, "steps": config.schedule.max_steps,
        "lr": config.learner.lr, "warmup_steps": config.learner.warmup_steps, "betas": config.learner.betas,
    }  # fmt: skip
    path, log = folder / f"trl{seed}.json", folder / f"trl{seed}.jsonl"
    path.write_bytes(orjson.dumps(settings))
    script = Path(__file__).with_name("trl_side.py")
    started = time.time()
    execute([sys.executable, script, path, log], folder / f"trl{seed}.log", threads=threads)
    steps = read_lines(log)
    return Course([step["time"] - started for step in steps], [step["reward"] for step in steps], steps[-1]["tokens"])


def configuration_file(folder: Path) -> Path:
    """The quickstart's configuration without evaluation."""
    path = folder / "quickstart.toml"
    lines = (ROOT / "configs/quickstart.toml").read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("eval_path")))
    return path


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    arguments.add_argument("--runs", type=Path, metavar="FILE", help="JSONL file of runs, which are not run again")
    options = arguments.parse_args()
    if options.quick and options.runs:
        arguments.error("--runs keeps runs that count, and those of --quick do not; leave one of them out")
    steps, seeds, wanted, overrides = options.steps, options.seeds, REWARD, []
    if options.quick:
        steps, seeds, wanted = WINDOW_STEPS, 1, 0.0
        overrides = ["--schedule.rollout_batch_size", "4", "--schedule.over_sampling_batch_size", "6"]
        overrides += ["--sampling.max_response_tokens", "64"]
    overrides += ["--schedule.max_steps", str(steps)]
    courses = {run_april: [], run_trl: []}
    with tempfile.TemporaryDirectory(prefix="april-end-to-end-") as made:
        folder = Path(made)
        policy = quickstart_policy(folder, options.quick)
        prompts, _ = make_data(folder / "data")
        before = known_courses(options.runs, steps)
        for seed in range(seeds):
            known = all((side.__name__, seed) in before for side in courses)
            for side in in_turns(seed, run_april, run_trl):
                name = side.__name__
                course = before[name, seed] if known else side(folder, policy, prompts, seed, overrides)
                courses[side].append(course)
                if not known:
                    note(f"{name}, seed {seed}", course, wanted)
                    write_run(options.runs, {"side": name, "seed": seed} | asdict(course))
    ours, theirs = courses.values()
    speeds = [[course.tokens_per_s for course in side] for side in (ours, theirs)]
    times = [[course.seconds_to(wanted) for course in side] for side in (ours, theirs)]
    vs_trl = [ratio_of_times(*pair, wanted) for pair in zip(ours, theirs, strict=True)]
    rows = [Row("e2e_vs_trl", ratios(*speeds), "ratio"), Row("time_to_reward_vs_trl", vs_trl, "ratio")]
    for name, courses_of_side, speed, seconds in zip(("april", "trl"), (ours, theirs), speeds, times, strict=True):
        reached = [at or course.seconds[-1] for at, course in zip(seconds, courses_of_side, strict=True)]
        rows += [
            Row(f"{name}_tokens_per_s", speed, "tokens/s"),
            Row(f"{name}_time_to_reward", reached, "s"),
            Row(f"{name}_seeds_that_never_reached_it", [sum(at is None for at in seconds)], "seeds"),
        ]
    report(rows, options.json)


def known_courses(path: Path | None, steps: int) -> dict[tuple[str, int], Course]:
    """Courses of so many steps in a file of runs, by side and seed."""
    return {
        (line["side"], line["seed"]): Course(line["seconds"], line["rewards"], line["tokens"])
        for line in read_runs(path)
        if len(line["seconds"]) == steps
    }


def note(name: str, course: Course, wanted: float, more: str = "") -> None:
    """Print what a run has reached."""
    reached, end = course.seconds_to(wanted), course.rewards[-1]
    when = "never" if reached is None else f"after {reached:.1f} s"
    said = f"{course.tokens_per_s:,.0f} tokens/s, reward {wanted:g} {when}, {end:.3f} after {course.seconds[-1]:.1f} s"
    print(f"{name}: {said}{more}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
