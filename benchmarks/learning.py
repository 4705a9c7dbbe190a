"""How soon and how far the quickstart's policy learns by schedule: `april run` with `sync`, `april` and `continuous`.

The same number of samples in every run, and the same policy, prompts, learning rate and slots; schedules take turns,
and a seed's runs are compared with each other. Seconds count from the first lease: starting processes is left out.
With `--paced` engines and learner keep an accelerator's time (`paced.toml`), and there is more than one over-sampling.
With `--lengths` their responses have forced lengths: nothing is learned, and what counts is how fast, and what the
simulator has said of it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import sys
import tempfile
import tomllib
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import orjson
import torch
from common import Row, parser, read_runs, report, write_run
from end_to_end import REWARD, ROOT, SEEDS, WINDOW_STEPS, Course, configuration_file, execute, ratio_of_times
from forced_engine import LENGTHS
from paced_prediction import Measured, busy_share
from paced_prediction import rows as foretold_rows
from staleness import HELD_OUT, Sampler

from april.config import ConfigError
from april.config.costs import pacing_of
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
SAMPLES = 8
"""of a group"""
LONGEST_TOKENS = 512
"""of a response"""


@dataclass(frozen=True)
class Arm:
    """One way to make the batches."""

    kind: str
    in_flight: int
    """groups of a round, or samples for `continuous`"""
    groups: int = GROUPS
    """of a batch"""
    overlap: bool = False

    @property
    def keys(self) -> dict:
        wanted = "in_flight" if self.kind == "continuous" else "over_sampling_batch_size"
        keys: dict = {
            "schedule.kind": self.kind,
            "schedule.rollout_batch_size": self.groups,
            f"schedule.{wanted}": self.in_flight,
        }
        return keys | ({"schedule.overlap": True} if self.overlap else {})

    @property
    def slots(self) -> int:
        """Of each of two workers, for all that is in flight."""
        return (self.in_flight if self.kind == "continuous" else self.in_flight * SAMPLES) // 2

    def steps(self, of_32_groups: int) -> int:
        """As many samples as in so many batches of 32 groups."""
        return of_32_groups * GROUPS // self.groups


@dataclass(frozen=True)
class Study:
    """What is compared with the arm called `sync`, and the keys that all arms have."""

    prefix: str
    steps: int
    arms: dict[str, Arm]
    keys: dict
    config: str = "quickstart.toml"
    """in `configs`"""
    pace: str = ""
    """hardware or file whose time is kept; "" for none"""
    factor: float = 1.0
    """seconds that pass for one of the accelerator's"""
    token_s: float = 0.0
    """of the learner, on the accelerator"""
    longest_tokens: int = LONGEST_TOKENS
    lengths: dict = field(default_factory=dict)
    """a simulator's section, of forced lengths; empty: the policy's own"""

    @property
    def label(self) -> str:
        """What a file of runs tells them apart by."""
        return f"{self.prefix}{Path(self.pace).name}-{self.factor:g}" if self.pace else ""

    @property
    def holds_out(self) -> bool:
        """Whether its policy is asked what it has learned, one response a prompt."""
        return not self.lengths and self.config == "quickstart.toml"

    @property
    def environment(self) -> dict[str, str]:
        """In which a run finds the engine that lies here, and its lengths."""
        here = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
        return here | {LENGTHS: orjson.dumps(self.lengths).decode()} if self.lengths else {}


AS_IT_IS = Study(
    "",
    STEPS,
    {
        "sync": Arm("sync", GROUPS),
        "april": Arm("april", OVER_SAMPLED),
        "continuous": Arm("continuous", IN_FLIGHT),
    },
    {},
)
PACE = str(Path(__file__).with_name("paced.toml"))
FACTOR = 6.0
"""seconds that pass for one of the accelerator's: two cores keep up with twice a batch in flight"""
TOKEN_S = 2.8e-5
"""of the learner, on the accelerator: a tenth of a step of `sync`, as in configs/published.toml"""
PACED = Study(
    "paced_",
    16,
    {
        "sync": Arm("sync", GROUPS),
        "april": Arm("april", 2 * GROUPS),
        "continuous": Arm("continuous", GROUPS * SAMPLES),
        "april_overlap": Arm("april", 2 * GROUPS, overlap=True),
        "april_1_5": Arm("april", 3 * GROUPS // 2),
        "april_3": Arm("april", 3 * GROUPS),
        "continuous_2": Arm("continuous", 2 * GROUPS * SAMPLES),
        "sync_of_64": Arm("sync", 2 * GROUPS, groups=2 * GROUPS),
    },
    {"learner.ranks": 1},
    pace=PACE,
    factor=FACTOR,
    token_s=TOKEN_S,
)
TASKS = {"quickstart": {}, "calculator": {"config": "calculator.toml", "longest_tokens": 64}}
FORCED = {
    "pareto": {"family": "pareto", "alpha": 1.1, "smallest_tokens": 16},
    "two_point": {"family": "bimodal", "short_tokens": 32, "long_tokens": LONGEST_TOKENS, "long_share": 0.05},
}
"""63 and 56 tokens on the mean, up to 512"""
COLOURS = {"sync": ORANGE, "april": BLUE, "continuous": GREEN}
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom"""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    arm: str
    seed: int
    course: Course
    """seconds since the first lease"""
    held_out: float
    """accuracy of the last weights at temperature 1"""
    staleness: float
    """mean of the trained tokens (steps)"""
    busy: float
    """share of the slots, as `busy_share` has it"""
    late: float
    """share of the paced engines' steps that this machine could not make in time, or of the learner's time beyond what
    its model says, whichever is more"""
    study: str = ""
    """its `label`"""

    @property
    def smoothed(self) -> np.ndarray:
        """Mean reward of the batches up to each one, at most WINDOW_STEPS."""
        rewards = self.course.rewards
        return np.array([fmean(rewards[max(0, end - WINDOW_STEPS) : end]) for end in range(1, len(rewards) + 1)])

    def reward_at(self, seconds: np.ndarray | float) -> np.ndarray:
        """The smoothed reward at these times, between two steps on the straight line."""
        return np.interp(seconds, self.course.seconds, self.smoothed)


def train(folder: Path, policy: Path, prompts: Path, study: Study, name: str, seed: int, keys: dict, held_out: int):
    """The outcome of one run, which stays in `folder`, where an earlier one of its name gives way to it."""
    run_name = f"{name}-{seed}"
    shutil.rmtree(folder / run_name, ignore_errors=True)
    keys = keys | {"run.dir": folder, "run.name": run_name, "model.path": policy, "data.path": prompts, "seed": seed}
    keys |= study.arms[name].keys | study.keys
    if study.pace:
        keys |= paced_keys(study) | {"worker.slots": study.arms[name].slots}
    overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "april.cli", "run", str(configuration_file(folder, study.config)), *overrides]
    execute(command, folder / f"{run_name}.log", threads=1, **study.environment)
    run = read_run(folder / run_name)
    began = min(lane["start"] for lane in run.lanes if lane["kind"] == "generate")
    course = Course(
        [step["time"] - began for step in run.steps],
        [step["reward"] for step in run.steps],
        sum(step["tokens"] for step in run.steps),
    )
    reached = accuracy(folder / run_name / "checkpoints/policy", held_out) if study.holds_out else 0.0
    late = late_share(folder / run_name, run.steps, keys.get("learner.pace_token_s", 0.0))
    staleness, busy = run.summary["staleness"]["mean"], busy_share(run)
    return Outcome(name, seed, course, reached, staleness, busy, late, study.label)


def paced_study(task: str, lengths: str = "", pace: str = PACE, factor: float = FACTOR) -> Study:
    """`pace`: hardware, or a file with a [cost], and with a [learner] `token_s` where that is to be another."""
    pacing_of(pace)
    prefix = "_".join(["paced", *([task] if task != "quickstart" else []), *([lengths] if lengths else []), ""])
    given = tomllib.loads(Path(pace).read_text()) if Path(pace).suffix else {}
    return replace(
        PACED,
        prefix=prefix,
        pace=str(Path(pace).absolute()) if Path(pace).suffix else pace,
        factor=factor,
        token_s=given.get("learner", {}).get("token_s", TOKEN_S),
        lengths=FORCED[lengths] | {"longest_tokens": LONGEST_TOKENS} if lengths else {},
        **TASKS[task],
    )


def paced_keys(study: Study) -> dict:
    return {
        "worker.engine": "forced_engine:Entry" if study.lengths else "paced",
        "engine.pace": study.pace,
        "engine.pace_factor": study.factor,
        "learner.pace_token_s": study.factor * study.token_s,
    }


def late_share(run_folder: Path, steps: list[dict], token_s: float) -> float:
    if not token_s:
        return 0.0
    engines = [orjson.loads(file.read_bytes()) for file in (run_folder / "paced").glob("*.json")]
    of_engines = sum(one["late_steps"] for one in engines) / sum(one["steps"] for one in engines)
    trained_s = sum(step["learner"]["train_s"] for step in steps)
    return max(of_engines, trained_s / (token_s * sum(step["tokens"] for step in steps)) - 1)


def foretold(study: Study, outcomes: list[Outcome], folder: Path, steps: int) -> list[Row]:
    """What the simulator says of the paced arms whose runs are in `folder`."""
    rows = []
    for name, arm in study.arms.items():
        runs = [
            Measured(made, one.seed, one.course.tokens_per_s * study.factor, one.staleness)
            for one in outcomes
            if one.arm == name and (made := folder / f"{name}-{one.seed}").is_dir()
        ]
        keys = arm.keys | {
            "schedule.n_samples_per_prompt": SAMPLES,
            "lengths.longest_tokens": study.longest_tokens,
            "engines.count": 2,
            "engines.slots": arm.slots,
            "learner.token_s": study.token_s,
            "steps": arm.steps(steps),
        }
        rows += foretold_rows(study.prefix + name, keys, runs, study.pace, study.lengths) if runs else []
    errors = [abs(row.to_json()["value"]) for row in rows if row.name.startswith("prediction_error")]
    return [*rows, Row("prediction_error_max", [max(errors)], "ratio")] if errors else []


def accuracy(policy: Path, held_out: int) -> float:
    sampler = Sampler(policy)
    sampler.engine.load_weights(Version(0, 0), load_folder_weights(policy))
    return sampler.held_out(held_out)


def rows_of(study: Study, outcomes: list[Outcome], wanted: float) -> list[Row]:
    by_arm = {
        name: sorted((one for one in outcomes if one.arm == name), key=lambda one: one.seed) for name in study.arms
    }
    by_arm = {name: runs for name, runs in by_arm.items() if runs}
    times = {name: [seconds_to(wanted, one) for one in runs] for name, runs in by_arm.items()}
    over = [min(one.course.seconds[-1] for one in of_seed) for of_seed in zip(*by_arm.values(), strict=True)]
    rows = []
    for arm, runs in by_arm.items():
        name = study.prefix + arm
        rows += [
            Row(f"tokens_per_s_{name}", [one.course.tokens_per_s for one in runs], "tokens/s"),
            Row(f"staleness_{name}", [one.staleness for one in runs], "steps"),
            Row(f"busy_{name}", [one.busy for one in runs], "share of slots"),
        ]
        if study.pace:
            rows.append(Row(f"late_{name}", [one.late for one in runs], "share of steps", of=max))
        if study.lengths:
            continue
        rows += [
            Row(f"time_to_reward_{name}", times[arm], "s"),
            Row(f"short_of_reward_{name}", [sum(one.course.seconds_to(wanted) is None for one in runs)], "seeds"),
            Row(
                f"reward_at_same_time_{name}",
                [float(one.reward_at(at)) for one, at in zip(runs, over, strict=True)],
                "reward",
                of=fmean,
            ),
            Row(f"reward_at_end_{name}", [end_reward(one) for one in runs], "reward", of=fmean),
        ]
        if study.holds_out:
            rows.append(Row(f"heldout_{name}", [one.held_out for one in runs], "accuracy", of=fmean))
    for arm in [arm for arm in by_arm if arm != "sync" and not study.lengths]:
        name = study.prefix + arm
        pairs = list(zip(by_arm[arm], by_arm["sync"], strict=True))
        ratios = [ratio_of_times(ours.course, theirs.course, wanted) for ours, theirs in pairs]
        sooner = [theirs - ours for ours, theirs in zip(times[arm], times["sync"], strict=True)]
        rows.append(Row(f"time_to_reward_{name}_vs_sync", ratios, "ratio"))
        rows.append(Row(f"time_to_reward_{name}_vs_sync_p", [sign_flip_p(sooner)], "p"))
        for measure, of in (("reward_at_end", end_reward), ("heldout", lambda one: one.held_out)):
            if measure == "heldout" and not study.holds_out:
                continue
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


def curves(study: Study, outcomes: list[Outcome]):
    """Mean reward with its 95 % band over seeds, by samples trained and by seconds."""
    figure, (by_samples, by_time) = new_figure(5.2, 2)
    for name, colour in COLOURS.items():
        runs = [one for one in outcomes if one.arm == name]
        samples = study.arms[name].groups * SAMPLES * np.arange(1, 1 + len(runs[0].course.rewards))
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
    arguments.add_argument("--steps", type=int, help="batches of 32 groups [default 24, paced 16]")
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="at least 2, for the spread between them")
    arguments.add_argument("--picture", type=Path, metavar="PNG", help="where the reward curves are drawn")
    arguments.add_argument(
        "--runs", type=Path, metavar="FILE", help="each run is a line of JSON there, and none that it has is run again"
    )
    arguments.add_argument("--paced", action="store_true", help="under an accelerator's arithmetic")
    arguments.add_argument("--arms", nargs="+", metavar="ARM", help="only these, and `sync`")
    arguments.add_argument("--folder", type=Path, help="where the runs are made and stay [default a temporary one]")
    arguments.add_argument("--task", choices=TASKS, default="quickstart", help="of paced runs [default %(default)s]")
    arguments.add_argument("--lengths", choices=FORCED, help="of paced runs, forced; default the policy's own")
    arguments.add_argument("--pace", metavar="NAME|FILE", help="whose time paced runs keep [default paced.toml]")
    arguments.add_argument("--factor", type=float, help="seconds that pass for one of its [default 6]")
    options = arguments.parse_args()
    asked = {key: getattr(options, key) for key in ("lengths", "pace", "factor") if getattr(options, key)}
    if (asked or options.task != "quickstart") and not options.paced:
        arguments.error("--task, --lengths, --pace and --factor are for paced runs; add --paced")
    if options.lengths and options.task != "quickstart":
        arguments.error(f"--task {options.task} has turns of its own, which --lengths {options.lengths} cannot force")
    try:
        study = paced_study(options.task, **asked) if options.paced else AS_IT_IS
    except ConfigError as error:
        arguments.error(str(error))
    if unknown := set(options.arms or ()) - study.arms.keys():
        arguments.error(f"--arms {' '.join(sorted(unknown))} are none; use {', '.join(study.arms)}")
    arms = [name for name in study.arms if not options.arms or name in ("sync", *options.arms)]
    if options.quick and options.runs:
        arguments.error("--runs keeps runs that count, and those of --quick do not; leave one of them out")
    if options.seeds < 2 and not study.lengths:
        arguments.error(f"--seeds {options.seeds} says nothing of the spread between them; give at least 2")
    torch.set_num_threads(1)
    steps, seeds, wanted, held_out, keys = options.steps or study.steps, options.seeds, REWARD, HELD_OUT, {}
    if options.quick:
        steps, seeds, wanted, held_out = WINDOW_STEPS + 1, 2, 0.0, 64
        keys = {"sampling.max_response_tokens": 64}
    outcomes, before = [], known_outcomes(options.runs, study, steps)
    with tempfile.TemporaryDirectory(prefix="april-learning-") as made:
        folder = options.folder.absolute() if options.folder else Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if options.quick:
            policy = make_policy(folder / "policy", recipe=Recipe(easy_steps=2, clean_steps=2, noisy_steps=2))
        else:
            policy = make_policy(ROOT / "cache/policy", log=lambda line: print(line, file=sys.stderr))
        prompts, _ = make_data(folder / "data")
        for seed in range(seeds):
            for turn in range(len(arms)):
                name = arms[(seed + turn) % len(arms)]
                if (name, seed) in before:
                    outcomes.append(before[name, seed])
                    continue
                keys["schedule.max_steps"] = study.arms[name].steps(steps)
                outcomes.append(train(folder, policy.absolute(), prompts, study, name, seed, keys, held_out))
                log(outcomes[-1], wanted, options.runs)
        rows = rows_of(study, outcomes, wanted)
        if study.pace and not options.quick:
            rows += foretold(study, outcomes, folder, steps)
    report(rows, options.json)
    if options.picture:
        draw(options.picture, lambda: curves(study, outcomes))


def known_outcomes(path: Path | None, study: Study, steps: int) -> dict[tuple[str, int], Outcome]:
    """What `log` has written of runs of so many steps, by arm and seed."""
    outcomes = [Outcome(**line | {"course": Course(**line["course"])}) for line in read_runs(path)]
    return {
        (one.arm, one.seed): one
        for one in outcomes
        if one.study == study.label
        and one.arm in study.arms
        and len(one.course.seconds) == study.arms[one.arm].steps(steps)
    }


def log(outcome: Outcome, wanted: float, path: Path | None) -> None:
    reached, course = outcome.course.seconds_to(wanted), outcome.course
    when = "never" if reached is None else f"after {reached:.1f} s"
    end = f"{end_reward(outcome):.3f} at the end after {course.seconds[-1]:.1f} s, held out {outcome.held_out:.4f}"
    late = f", {100 * outcome.late:.1f} % late" if outcome.late else ""
    print(f"{outcome.arm}, seed {outcome.seed}: reward {wanted:g} {when}, {end}{late}", file=sys.stderr, flush=True)
    write_run(path, asdict(outcome))


if __name__ == "__main__":
    main()
