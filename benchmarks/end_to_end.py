"""`april run` against TRL's GRPOTrainer, end to end: generated-and-trained tokens/s, and time to a mean reward of 0.8.

Both from the start of their processes to the end of the last step, on the quickstart's policy, prompts and verifier,
with the same loss (April's tokens that are stale are corrected as by default, TRL has none), learning rate, samples a
step, sampling and fp32; lengths are long-tailed. The seeds are paired, and who goes first alternates.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import orjson
from common import Row, parser, read_runs, report, write_run

from april import config as configuration
from april.data.make_data import make_data
from april.policy.make_policy import make_policy
from april.policy.warm_start import Recipe
from april.report.run_folder import read_records

ROOT = Path(__file__).parent.parent
STEPS, SEEDS = 12, 5
REWARD = 0.8
WINDOW_STEPS = 3
"""the reward is a mean over the last so many steps"""
CORES = 2
LONGEST_S = 3600.0
"""a run that takes longer has failed"""


@dataclass(frozen=True)
class Course:
    """What a run has reached when: seconds since its processes were started."""

    seconds: list[float]
    rewards: list[float]
    tokens: int

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
    chosen = ["--run.dir", str(folder), "--run.name", f"april{seed}", "--seed", str(seed)]
    paths = ["--model.path", str(policy), "--data.path", str(prompts)]
    command = [sys.executable, "-m", "april.cli", "run", str(configuration_file(folder)), *chosen, *paths, *overrides]
    started = time.time()
    execute(command, folder / f"april{seed}.log", threads=1)
    steps = read_records(folder / f"april{seed}/metrics.jsonl")
    return Course(
        [step["time"] - started for step in steps],
        [step["reward"] for step in steps],
        sum(step["tokens"] for step in steps),
    )


def run_trl(
    folder: Path, policy: Path, prompts: Path, seed: int, overrides: list[str], backend: str, threads: int = CORES
) -> Course:
    config = configuration.load(
        configuration_file(folder), ["--model.path", str(policy), "--data.path", str(prompts), *overrides]
    )
    settings = {
        "policy": str(policy),
        "prompts": str(prompts),
        "seed": seed,
        "threads": threads,
        "groups": config.schedule.rollout_batch_size,
        "group_size": config.schedule.n_samples_per_prompt,
        "max_response_tokens": config.sampling.max_response_tokens,
        "steps": config.schedule.max_steps,
        "lr": config.learner.lr,
        "warmup_steps": config.learner.warmup_steps,
        "betas": config.learner.betas,
        "backend": backend,
    }
    path, log = folder / f"trl{seed}.json", folder / f"trl{seed}.jsonl"
    path.write_bytes(orjson.dumps(settings))
    script = Path(__file__).with_name("trl_run.py")
    started = time.time()
    execute([sys.executable, str(script), str(path), str(log)], folder / f"trl{seed}.log", threads=threads)
    steps = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    return Course(
        [step["time"] - started for step in steps], [step["reward"] for step in steps], int(steps[-1]["tokens"])
    )


def configuration_file(folder: Path, name: str = "quickstart.toml") -> Path:
    """The quickstart's or another, without evaluation."""
    path = folder / name
    lines = (ROOT / "configs" / name).read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("eval_path")))
    return path


def execute(command: list[str], log: Path, threads: int, **environment: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)} | environment
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT, timeout=LONGEST_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{log.read_text()[-3000:]}")


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument(
        "--backend", choices=("generate", "continuous"), default="continuous", help="TRL's generation"
    )
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    arguments.add_argument(
        "--runs",
        type=Path,
        metavar="FILE",
        help="each run is a line of JSON there; pairs that it has are not run again",
    )
    options = arguments.parse_args()
    if options.quick and options.runs:
        arguments.error("--runs keeps runs that count, and those of --quick do not; leave one of them out")
    steps, seeds, wanted, overrides = options.steps, options.seeds, REWARD, []
    if options.quick:
        steps, seeds, wanted = WINDOW_STEPS, 1, 0.0
        overrides = ["--schedule.rollout_batch_size", "4", "--schedule.over_sampling_batch_size", "6"]
        overrides += ["--sampling.max_response_tokens", "64"]
    overrides += ["--schedule.max_steps", str(steps)]
    courses = {"april": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="april-end-to-end-") as made:
        folder = Path(made)
        if options.quick:
            policy = make_policy(folder / "policy", recipe=Recipe(easy_steps=2, clean_steps=2, noisy_steps=2))
        else:
            policy = make_policy(ROOT / "cache/policy", log=lambda line: print(line, file=sys.stderr))
        prompts, _ = make_data(folder / "data")
        before = known_courses(options.runs, options.backend, steps)
        for seed in range(seeds):
            if before.keys() >= {("april", seed), ("trl", seed)}:
                for name in courses:
                    courses[name].append(before[name, seed])
                continue
            runs = {
                "april": lambda seed=seed: run_april(folder, policy, prompts, seed, overrides),
                "trl": lambda seed=seed: run_trl(folder, policy, prompts, seed, overrides, options.backend),
            }
            for name in sorted(runs, reverse=bool(seed % 2)):
                courses[name].append(runs[name]())
                log(name, seed, courses[name][-1], wanted, options.runs, options.backend)
    pairs = list(zip(courses["april"], courses["trl"], strict=True))
    times = [(ours.seconds_to(wanted), theirs.seconds_to(wanted)) for ours, theirs in pairs]
    whole = [
        (ours or pair[0].seconds[-1], theirs or pair[1].seconds[-1])
        for (ours, theirs), pair in zip(times, pairs, strict=True)
    ]
    rows = [
        Row("e2e_vs_trl", [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs], "ratio"),
        Row("time_to_reward_vs_trl", [ratio_of_times(ours, theirs, wanted) for ours, theirs in pairs], "ratio"),
        Row("april_tokens_per_s", [ours.tokens_per_s for ours, _ in pairs], "tokens/s"),
        Row("trl_tokens_per_s", [theirs.tokens_per_s for _, theirs in pairs], "tokens/s"),
        Row("april_time_to_reward", [ours for ours, _ in whole], "s"),
        Row("trl_time_to_reward", [theirs for _, theirs in whole], "s"),
        Row("april_seeds_that_never_reached_it", [float(sum(ours is None for ours, _ in times))], "seeds"),
        Row("trl_seeds_that_never_reached_it", [float(sum(theirs is None for _, theirs in times))], "seeds"),
    ]
    report(rows, options.json)


def known_courses(path: Path | None, backend: str, steps: int) -> dict[tuple[str, int], Course]:
    """What `log` has written of runs of so many steps beside that backend, by side and seed."""
    return {
        (line["side"], line["seed"]): Course(line["seconds"], line["rewards"], line["tokens"])
        for line in read_runs(path)
        if line["backend"] == backend and len(line["seconds"]) == steps
    }


def log(name: str, seed: int, course: Course, wanted: float, path: Path | None, backend: str) -> None:
    reached, end = course.seconds_to(wanted), course.rewards[-1]
    when = "never" if reached is None else f"after {reached:.1f} s"
    said = f"{course.tokens_per_s:,.0f} tokens/s, reward {wanted:g} {when}, {end:.3f} after {course.seconds[-1]:.1f} s"
    print(f"{name}, seed {seed}: {said}", file=sys.stderr, flush=True)
    write_run(path, {"side": name, "seed": seed, "backend": backend} | asdict(course))


if __name__ == "__main__":
    main()
