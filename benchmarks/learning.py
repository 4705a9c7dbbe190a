"""How soon and how far the quickstart's policy learns by schedule: `april run` with `sync`, `april` and `continuous`.

The same number of samples in every run, and the same policy, prompts, learning rate and slots; schedules take turns,
and a seed's runs are compared with each other. Seconds count from the first lease: starting processes is left out.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from common import Row, parser, read_runs, report, write_run
from end_to_end import REWARD, ROOT, SEEDS, WINDOW_STEPS, Course, configuration_file, execute, ratio_of_times
from staleness import HELD_OUT, Sampler

from april.data.make_data import make_data
from april.policy.make_policy import make_policy
from april.policy.warm_start import Recipe
from april.report.drawing import BLUE, GREEN, ORANGE, new_figure
from april.report.run_folder import read_run
from april.simulate.pictures import draw
from april.wire.version import Version
from april.workers.engines.folder_weights import load_folder_weights

STEPS, END_STEPS = 24, 5
"""the reward at the end is a mean over the last so many batches"""
GROUPS, OVER_SAMPLED = 32, 48
IN_FLIGHT = 144
"""of `continuous`: what two workers take, 64 slots and 8 waiting samples each"""
SCHEDULES = {
    "sync": {"over_sampling_batch_size": GROUPS},
    "april": {"over_sampling_batch_size": OVER_SAMPLED},
    "continuous": {"in_flight": IN_FLIGHT},
}
COLOURS = {"sync": ORANGE, "april": BLUE, "continuous": GREEN}
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom"""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    schedule: str
    seed: int
    course: Course
    """seconds since the first lease"""
    held_out: float
    """accuracy of the last weights at temperature 1"""
    staleness: float
    """mean of the trained tokens (steps)"""

    @property
    def smoothed(self) -> np.ndarray:
        """Mean reward of the batches up to each one, at most WINDOW_STEPS."""
        rewards = self.course.rewards
        return np.array([fmean(rewards[max(0, end - WINDOW_STEPS) : end]) for end in range(1, len(rewards) + 1)])

    def reward_at(self, seconds: np.ndarray | float) -> np.ndarray:
        """The smoothed reward at these times, between two steps on the straight line."""
        return np.interp(seconds, self.course.seconds, self.smoothed)


def train(folder: Path, policy: Path, prompts: Path, schedule: str, seed: int, keys: dict, held_out: int) -> Outcome:
    name = f"{schedule}{seed}"
    keys = keys | {"run.dir": folder, "run.name": name, "model.path": policy, "data.path": prompts, "seed": seed}
    keys |= {"schedule.kind": schedule} | {f"schedule.{key}": value for key, value in SCHEDULES[schedule].items()}
    overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "april.cli", "run", str(configuration_file(folder)), *overrides]
    execute(command, folder / f"{name}.log", threads=1)
    run = read_run(folder / name)
    began = min(lane["start"] for lane in run.lanes if lane["kind"] == "generate")
    course = Course(
        [step["time"] - began for step in run.steps],
        [step["reward"] for step in run.steps],
        sum(step["tokens"] for step in run.steps),
    )
    reached = accuracy(folder / name / "checkpoints/policy", held_out)
    return Outcome(schedule, seed, course, reached, run.summary["staleness"]["mean"])


def accuracy(policy: Path, held_out: int) -> float:
    sampler = Sampler(policy)
    sampler.engine.load_weights(Version(0, 0), load_folder_weights(policy))
    return sampler.held_out(held_out)


def rows_of(outcomes: list[Outcome], wanted: float) -> list[Row]:
    by_name = {
        name: sorted((one for one in outcomes if one.schedule == name), key=lambda one: one.seed) for name in SCHEDULES
    }
    times = {name: [seconds_to(wanted, one) for one in runs] for name, runs in by_name.items()}
    over = [min(one.course.seconds[-1] for one in of_seed) for of_seed in zip(*by_name.values(), strict=True)]
    rows = []
    for name, runs in by_name.items():
        rows += [
            Row(f"time_to_reward_{name}", times[name], "s"),
            Row(f"short_of_reward_{name}", [sum(one.course.seconds_to(wanted) is None for one in runs)], "seeds"),
            Row(
                f"reward_at_same_time_{name}",
                [float(one.reward_at(at)) for one, at in zip(runs, over, strict=True)],
                "reward",
                of=fmean,
            ),
            Row(f"reward_at_end_{name}", [end_reward(one) for one in runs], "reward", of=fmean),
            Row(f"heldout_{name}", [one.held_out for one in runs], "accuracy", of=fmean),
            Row(f"tokens_per_s_{name}", [one.course.tokens_per_s for one in runs], "tokens/s"),
            Row(f"staleness_{name}", [one.staleness for one in runs], "steps"),
        ]
    for name in [name for name in SCHEDULES if name != "sync"]:
        pairs = list(zip(by_name[name], by_name["sync"], strict=True))
        ratios = [ratio_of_times(ours.course, theirs.course, wanted) for ours, theirs in pairs]
        sooner = [theirs - ours for ours, theirs in zip(times[name], times["sync"], strict=True)]
        rows.append(Row(f"time_to_reward_{name}_vs_sync", ratios, "ratio"))
        rows.append(Row(f"time_to_reward_{name}_vs_sync_p", [sign_flip_p(sooner)], "p"))
        for measure, of in (("reward_at_end", end_reward), ("heldout", lambda one: one.held_out)):
            gaps = [of(theirs) - of(ours) for ours, theirs in pairs]
            unit = "accuracy" if measure == "heldout" else "reward"
            rows += [
                Row(f"{measure}_gap_{name}", gaps, unit, of=fmean),
                Row(f"{measure}_gap_{name}_95", [half_width(gaps)], unit),
                Row(f"{measure}_gap_{name}_p", [sign_flip_p(gaps)], "p"),
            ]
    return rows


def seconds_to(wanted: float, outcome: Outcome) -> float:
    """A run that does not get there counts with the time of its last step."""
    reached = outcome.course.seconds_to(wanted)
    return outcome.course.seconds[-1] if reached is None else reached


def end_reward(outcome: Outcome) -> float:
    return fmean(outcome.course.rewards[-END_STEPS:])


def half_width(values: list[float]) -> float:
    """Of the 95 % confidence interval of their mean, by Student's t."""
    freedom = len(values) - 1
    quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom
    return quantile * stdev(values) / sqrt(len(values))


def sign_flip_p(differences: list[float]) -> float:
    """One-sided p of the paired permutation test: how often random signs give a mean as large or larger."""
    sums = [
        sum(sign * one for sign, one in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(one >= sum(differences) - 1e-12 for one in sums) / len(sums)


def curves(outcomes: list[Outcome], samples_per_step: int):
    """Mean reward with its 95 % band over seeds, by samples trained and by seconds."""
    figure, (by_samples, by_time) = new_figure(5.2, 2)
    for name, colour in COLOURS.items():
        runs = [one for one in outcomes if one.schedule == name]
        samples = samples_per_step * np.arange(1, 1 + len(runs[0].course.rewards))
        seconds = np.linspace(
            max(one.course.seconds[0] for one in runs), min(one.course.seconds[-1] for one in runs), 200
        )
        band(by_samples, samples, [one.smoothed for one in runs], colour, name)
        band(by_time, seconds, [one.reward_at(seconds) for one in runs], colour, name)
    for axes, label in ((by_samples, "samples trained"), (by_time, "seconds since the first lease")):
        axes.axhline(REWARD, color="#59636f", lw=0.8, ls=(0, (4, 3)))
        axes.set(xlabel=label, ylabel=f"reward, mean of {WINDOW_STEPS} batches")
        axes.set_xlim(0)
        axes.legend(loc="lower right", ncols=3)
    return figure


def band(axes, x: np.ndarray, runs: list[np.ndarray], colour: str, label: str) -> None:
    middle = np.mean(runs, axis=0)
    width = np.array([half_width(list(at)) for at in zip(*runs, strict=True)])
    axes.plot(x, middle, color=colour, label=f"{label}, {len(runs)} seeds")
    axes.fill_between(x, middle - width, middle + width, color=colour, alpha=0.15, lw=0)


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="at least 2, for the spread between them")
    arguments.add_argument("--picture", type=Path, metavar="PNG", help="where the reward curves are drawn")
    arguments.add_argument(
        "--runs", type=Path, metavar="FILE", help="each run is a line of JSON there, and none that it has is run again"
    )
    options = arguments.parse_args()
    if options.quick and options.runs:
        arguments.error("--runs keeps runs that count, and those of --quick do not; leave one of them out")
    if options.seeds < 2:
        arguments.error(f"--seeds {options.seeds} says nothing of the spread between them; give at least 2")
    torch.set_num_threads(1)
    steps, seeds, wanted, held_out, keys = options.steps, options.seeds, REWARD, HELD_OUT, {}
    if options.quick:
        steps, seeds, wanted, held_out = WINDOW_STEPS + 1, 2, 0.0, 64
        keys = {"sampling.max_response_tokens": 64}
    keys["schedule.max_steps"] = steps
    outcomes, before = [], known_outcomes(options.runs, steps)
    with tempfile.TemporaryDirectory(prefix="april-learning-") as made:
        folder = Path(made)
        if options.quick:
            policy = make_policy(folder / "policy", recipe=Recipe(easy_steps=2, clean_steps=2, noisy_steps=2))
        else:
            policy = make_policy(ROOT / "cache/policy", log=lambda line: print(line, file=sys.stderr))
        prompts, _ = make_data(folder / "data")
        for seed in range(seeds):
            for turn in range(len(SCHEDULES)):
                schedule = list(SCHEDULES)[(seed + turn) % len(SCHEDULES)]
                if (schedule, seed) in before:
                    outcomes.append(before[schedule, seed])
                    continue
                outcomes.append(train(folder, policy.absolute(), prompts, schedule, seed, keys, held_out))
                log(outcomes[-1], wanted, options.runs)
    report(rows_of(outcomes, wanted), options.json)
    if options.picture:
        draw(options.picture, lambda: curves(outcomes, GROUPS * 8))


def known_outcomes(path: Path | None, steps: int) -> dict[tuple[str, int], Outcome]:
    """What `log` has written of runs of so many steps, by schedule and seed."""
    outcomes = [Outcome(**line | {"course": Course(**line["course"])}) for line in read_runs(path)]
    return {(one.schedule, one.seed): one for one in outcomes if len(one.course.seconds) == steps}


def log(outcome: Outcome, wanted: float, path: Path | None) -> None:
    reached, course = outcome.course.seconds_to(wanted), outcome.course
    when = "never" if reached is None else f"after {reached:.1f} s"
    end = f"{end_reward(outcome):.3f} at the end after {course.seconds[-1]:.1f} s, held out {outcome.held_out:.4f}"
    print(f"{outcome.schedule}, seed {outcome.seed}: reward {wanted:g} {when}, {end}", file=sys.stderr, flush=True)
    write_run(path, asdict(outcome))


if __name__ == "__main__":
    main()
