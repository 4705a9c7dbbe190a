"""How soon and how far the quickstart's policy learns under each schedule: `sync`, `april` and `continuous`.

All runs train the same number of samples from the same policy with the same prompts, learning rate and slots. Schedules
take turns, and the runs of a seed are compared with each other. Seconds count from the first lease, so that starting
processes is left out. With `--paced`, engines and learner keep an accelerator's time (`paced.toml`).
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import product
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import numpy as np
import orjson
import torch
from common import APRIL, Row, execute, parser, quickstart_policy, read_runs, report, write_run
from end_to_end import REWARD, SEEDS, WINDOW_STEPS, Course, configuration_file, note, ratio_of_times

from april.data.arithmetic import draw_task, make_data
from april.data.tokenizer import Tokenizer
from april.observe.report.run_folder import read_run
from april.simulate.probe import load_folder_weights
from april.simulate.sweep import BLUE, GREEN, ORANGE, new_figure, write_picture
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.rewards.text import final_answer

STEPS, END_STEPS = 24, 5
"""Batches of a run, and of these the last ones over which the reward at the end is a mean."""
GROUPS, SAMPLES = 32, 8
"""Groups of a batch, and samples of a group."""
SLOTS, RESPONSE_TOKENS, HELD_OUT = 256, 512, 2048
"""The evaluation's slots, longest response (tokens), and number of held-out prompts."""
PACE = Path(__file__).with_name("paced.toml")
FACTOR = 6.0
"""Seconds that pass for a second of the accelerator: two cores keep up with twice a batch in flight."""
TOKEN_S = 2.8e-5
"""The learner's seconds a token on the accelerator: a tenth of a step of `sync`, as in configs/published.toml."""
COLOURS = {"sync": ORANGE, "april": BLUE, "continuous": GREEN}
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Study:
    """The schedules that are compared, and the keys of their runs."""

    prefix: str
    steps: int
    in_flight: dict[str, int]
    """By schedule: groups of a round; of `continuous`, samples in flight."""
    keys: dict = field(default_factory=dict)
    paced: bool = False

    def schedule_keys(self, kind: str) -> dict:
        """Keys of a schedule. Paced engines have slots for all that is in flight, divided between two workers."""
        count = self.in_flight[kind]
        wanted = "in_flight" if kind == "continuous" else "over_sampling_batch_size"
        keys = {"schedule.kind": kind, "schedule.rollout_batch_size": GROUPS, f"schedule.{wanted}": count} | self.keys
        slots = (count if kind == "continuous" else count * SAMPLES) // 2
        return keys | ({"worker.slots": slots} if self.paced else {})


AS_IT_IS = Study("", STEPS, {"sync": GROUPS, "april": 48, "continuous": 144})
"""`continuous` has in flight what two workers take: 64 slots and 8 waiting samples each."""
PACED = Study(
    "paced_",
    16,
    {"sync": GROUPS, "april": 2 * GROUPS, "continuous": GROUPS * SAMPLES},
    {
        "learner.ranks": 1,
        "worker.engine": "paced",
        "engine.pace": PACE,
        "engine.pace_factor": FACTOR,
        "learner.pace_token_s": FACTOR * TOKEN_S,
    },
    paced=True,
)


@dataclass(frozen=True)
class Outcome:
    """One run."""

    schedule: str
    seed: int
    course: Course
    """Rewards by seconds since the first lease."""
    held_out: float
    """Accuracy of the last weights on held-out prompts at temperature 1."""
    staleness: float
    """Mean age of the trained tokens (steps)."""
    late: float
    """Share of the paced engines' steps that this machine could not make in time, or of the learner's time beyond its
    model, whichever is more; 0 for runs that are not paced."""
    study: str = ""
    """The study's prefix."""

    @property
    def smoothed(self) -> np.ndarray:
        """Mean reward of the batches up to each one, at most WINDOW_STEPS."""
        rewards = self.course.rewards
        return np.array([fmean(rewards[max(0, end - WINDOW_STEPS) : end]) for end in range(1, len(rewards) + 1)])


def train(
    folder: Path, policy: Path, prompts: Path, study: Study, kind: str, seed: int, keys: dict, held_out: int
) -> Outcome:
    """Train one run, which stays in `folder`; an earlier run of its name is removed."""
    run_name = f"{kind}-{seed}"
    shutil.rmtree(folder / run_name, ignore_errors=True)
    keys = keys | {"run.dir": folder, "run.name": run_name, "model.path": policy, "data.path": prompts, "seed": seed}
    overrides = [word for key, value in (keys | study.schedule_keys(kind)).items() for word in (f"--{key}", value)]
    execute([*APRIL, "run", configuration_file(folder), *overrides], folder / f"{run_name}.log", threads=1)
    run = read_run(folder / run_name)
    began = min(lane["start"] for lane in run.worker_events if lane["kind"] == "generate")
    course = Course.of_steps(run.steps, began)
    reached = accuracy(folder / run_name / "checkpoints/policy", held_out)
    late = late_share(folder / run_name, run.steps) if study.paced else 0.0
    return Outcome(kind, seed, course, reached, run.summary["staleness"]["mean"], late, study.prefix)


def late_share(run_folder: Path, steps: list[dict]) -> float:
    engines = [orjson.loads(file.read_bytes()) for file in (run_folder / "paced").glob("*.json")]
    of_engines = sum(engine["late_steps"] for engine in engines) / sum(engine["steps"] for engine in engines)
    trained_s = sum(step["learner"]["train_s"] for step in steps)
    return max(of_engines, trained_s / (FACTOR * TOKEN_S * sum(step["tokens"] for step in steps)) - 1)


def accuracy(policy: Path, held_out: int) -> float:
    """Share of right answers among one response to each of so many held-out prompts, the same ones every time."""
    random, tokenizer = Random("held-out"), Tokenizer(policy)
    engine = TorchEngine(policy, slots=SLOTS, max_context=RESPONSE_TOKENS + 32)
    engine.load_weights(Version(0, 0), load_folder_weights(policy))
    tasks = [draw_task(random, "heldout") for _ in range(held_out)]
    for number, task in enumerate(tasks):
        prompt = np.asarray(tokenizer.encode_prompt(task.prompt), np.int32)
        stops = frozenset(tokenizer.eos_token_ids)
        engine.submit(Request(number, prompt, RESPONSE_TOKENS, seed=10**9 + number, stop_token_ids=stops))
    tokens: list[list[int]] = [[] for _ in tasks]
    reasons = [""] * len(tasks)
    while engine.live:
        for chunk in engine.step():
            tokens[chunk.id] += chunk.tokens.tolist()
            reasons[chunk.id] = chunk.finish_reason or ""
    graded = zip(tasks, tokens, reasons, strict=True)
    return fmean(final_answer(tokenizer.decode(np.array(said)), task.answer, end) for task, said, end in graded)


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(study: Study, outcomes: list[Outcome], wanted: float) -> list[Row]:
    runs = {
        kind: sorted((run for run in outcomes if run.schedule == kind), key=lambda run: run.seed)
        for kind in study.in_flight
    }
    times = {kind: [seconds_to(wanted, run) for run in runs[kind]] for kind in runs}
    rows = []
    for kind in runs:
        name = study.prefix + kind
        rows += [
            Row(f"tokens_per_s_{name}", [run.course.tokens_per_s for run in runs[kind]], "tokens/s"),
            Row(f"staleness_{name}", [run.staleness for run in runs[kind]], "steps"),
            Row(f"time_to_reward_{name}", times[kind], "s"),
            Row(f"short_of_reward_{name}", [sum(run.course.seconds_to(wanted) is None for run in runs[kind])], "seeds"),
            Row(f"reward_at_end_{name}", [end_reward(run) for run in runs[kind]], "reward", of=fmean),
            Row(f"heldout_{name}", [run.held_out for run in runs[kind]], "accuracy", of=fmean),
        ]
        if study.paced:
            rows.append(Row(f"late_{name}", [run.late for run in runs[kind]], "share of steps", of=max))
    for kind in ("april", "continuous"):
        name, pairs = study.prefix + kind, list(zip(runs[kind], runs["sync"], strict=True))
        vs_sync = [ratio_of_times(ours.course, theirs.course, wanted) for ours, theirs in pairs]
        sooner = [theirs - ours for ours, theirs in zip(times[kind], times["sync"], strict=True)]
        rows.append(Row(f"time_to_reward_{name}_vs_sync", vs_sync, "ratio"))
        rows.append(Row(f"time_to_reward_{name}_vs_sync_p", [sign_flip_p(sooner)], "p"))
        rows += gap_rows(f"reward_at_end_gap_{name}", [end_reward(b) - end_reward(a) for a, b in pairs], "reward")
        rows += gap_rows(f"heldout_gap_{name}", [b.held_out - a.held_out for a, b in pairs], "accuracy")
    return rows


def gap_rows(name: str, gaps: list[float], unit: str, two_sided: bool = False) -> list[Row]:
    """The mean of differences of paired runs, the half-width of its 95 % interval, and its p."""
    return [
        Row(name, gaps, unit, of=fmean),
        Row(f"{name}_95", [half_width(gaps)], unit),
        Row(f"{name}_p", [sign_flip_p(gaps, two_sided)], "p"),
    ]


def seconds_to(wanted: float, outcome: Outcome) -> float:
    """Seconds to the wanted reward; a run that does not get there counts with the time of its last step."""
    reached = outcome.course.seconds_to(wanted)
    return outcome.course.seconds[-1] if reached is None else reached


def end_reward(outcome: Outcome) -> float:
    return fmean(outcome.course.rewards[-END_STEPS:])


def half_width(values: list[float]) -> float:
    """Half-width of the 95 % confidence interval of their mean, by Student's t."""
    freedom = len(values) - 1
    quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom
    return quantile * stdev(values) / sqrt(len(values))


def sign_flip_p(differences: list[float], two_sided: bool = False) -> float:
    """The p of the paired permutation test: how often random signs give as large a mean, or one as far from 0."""
    size = abs if two_sided else float
    sums = [
        size(sum(sign * difference for sign, difference in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return fmean(value >= size(sum(differences)) - 1e-12 for value in sums)


# --- the picture ------------------------------------------------------------------------------------------------------


def curves(study: Study, outcomes: list[Outcome]):
    """Mean reward with its 95 % band over seeds, by samples trained and by seconds."""
    figure, (by_samples, by_time) = new_figure(5.2, 2)
    for kind, colour in COLOURS.items():
        runs = [run for run in outcomes if run.schedule == kind]
        courses = [run.course for run in runs]
        samples = GROUPS * SAMPLES * np.arange(1, 1 + len(courses[0].rewards))
        first, last = max(course.seconds[0] for course in courses), min(course.seconds[-1] for course in courses)
        seconds = np.linspace(first, last, 200)
        band(by_samples, samples, [run.smoothed for run in runs], colour, kind)
        band(by_time, seconds, [np.interp(seconds, run.course.seconds, run.smoothed) for run in runs], colour, kind)
    for axes, label in ((by_samples, "samples trained"), (by_time, "seconds since the first lease")):
        axes.axhline(REWARD, color="#59636f", lw=0.8, ls=(0, (4, 3)))
        axes.set(xlabel=label, ylabel=f"reward, mean of {WINDOW_STEPS} batches")
        axes.set_xlim(0)
        axes.legend(loc="lower right", ncols=3)
    return figure


def band(axes, x: np.ndarray, runs: list[np.ndarray], colour: str, label: str) -> None:
    middle = np.mean(runs, axis=0)
    width = np.array([half_width(list(values)) for values in zip(*runs, strict=True)])
    axes.plot(x, middle, color=colour, label=f"{label}, {len(runs)} seeds")
    axes.fill_between(x, middle - width, middle + width, color=colour, alpha=0.15, lw=0)


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--steps", type=int, help="batches of a run [default 24, paced 16]")
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="at least 2, for the spread between them")
    arguments.add_argument("--picture", type=Path, metavar="PNG", help="where the reward curves are drawn")
    arguments.add_argument("--runs", type=Path, metavar="FILE", help="JSONL file of runs, which are not run again")
    arguments.add_argument("--paced", action="store_true", help="engines and learner keep an accelerator's time")
    options = arguments.parse_args()
    if options.quick and options.runs:
        arguments.error("--runs keeps runs that count, and those of --quick do not; leave one of them out")
    if options.seeds < 2:
        arguments.error(f"--seeds {options.seeds} says nothing of the spread between them; give at least 2")
    torch.set_num_threads(1)
    study = PACED if options.paced else AS_IT_IS
    steps, seeds, wanted, held_out, keys = options.steps or study.steps, options.seeds, REWARD, HELD_OUT, {}
    if options.quick:
        steps, seeds, wanted, held_out = WINDOW_STEPS + 1, 2, 0.0, 64
        keys = {"sampling.max_response_tokens": 64}
    keys["schedule.max_steps"] = steps
    outcomes, before = [], known_outcomes(options.runs, study, steps)
    with tempfile.TemporaryDirectory(prefix="april-learning-") as made:
        folder, kinds = Path(made), list(study.in_flight)
        policy = quickstart_policy(folder, options.quick)
        prompts, _ = make_data(folder / "data")
        for seed in range(seeds):
            for kind in kinds[seed % len(kinds) :] + kinds[: seed % len(kinds)]:
                known = before.get((kind, seed))
                outcome = known or train(folder, policy, prompts, study, kind, seed, keys, held_out)
                outcomes.append(outcome)
                if not known:
                    note(f"{kind}, seed {seed}", outcome.course, wanted, f", held out {outcome.held_out:.4f}")
                    write_run(options.runs, asdict(outcome))
    report(rows_of(study, outcomes, wanted), options.json)
    if options.picture:
        write_picture(options.picture, lambda: curves(study, outcomes))


def known_outcomes(path: Path | None, study: Study, steps: int) -> dict[tuple[str, int], Outcome]:
    """Outcomes of this study's runs of so many steps in a file of runs, by schedule and seed."""
    outcomes = [Outcome(**line | {"course": Course(**line["course"])}) for line in read_runs(path)]
    return {
        (run.schedule, run.seed): run
        for run in outcomes
        if run.study == study.prefix and len(run.course.seconds) == steps
    }


if __name__ == "__main__":
    main()
