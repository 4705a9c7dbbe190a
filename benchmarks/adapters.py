"""Other trainers on April's rollouts: a single file against April's learner, TRL with April against TRL alone.

All on the quickstart's policy, prompts and verifier, each on the whole machine by itself, one process of training. A
speed is trained tokens a second from the end of the first step to the end of the last: starting up is left out.
"""

import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import orjson
from common import ROOT, Row, execute, parser, quickstart_policy, read_lines, report
from end_to_end import CORES, configuration_file, run_april, run_trl

from april.data.arithmetic import make_data
from april.observe.report.run_folder import read_records

STEPS, SEEDS = 8, 3
LEARNING_STEPS = 10
RANKS = ["--learner.ranks", "1"]
ADAPTERS = "trl", "slime", "openrlhf", "areal"
"""Adapters whose own time is measured, over a step of TRL's with April."""


@dataclass(frozen=True)
class Steps:
    """When each step ended (seconds), with which reward, and the tokens that it has trained."""

    times: list[float]
    rewards: list[float]
    tokens: list[int]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens[1:]) / (self.times[-1] - self.times[0])

    @property
    def step_s(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def steps_of_run(run_dir: Path) -> Steps:
    lines = read_records(run_dir / "metrics.jsonl")
    return Steps(*([line[key] for line in lines] for key in ("time", "reward", "tokens")))


def steps_of_trl(log: Path) -> Steps:
    """Its tokens are counted from the start."""
    lines = read_lines(log)
    tokens = np.diff([0, *(line["tokens"] for line in lines)]).tolist()
    return Steps([line["time"] for line in lines], [line["reward"] for line in lines], tokens)


def run_example(name: str, output: list[str], folder: Path, overrides: list[str], threads: int) -> Steps:
    """Run `examples/NAME.py` as it is, on as many threads as what it is compared with."""
    chosen = ["--run.dir", folder, "--run.name", name, *output, "--save-every", "1000", *overrides]
    command = [sys.executable, ROOT / f"examples/{name}.py", configuration_file(folder), *chosen]
    execute(command, folder / f"{name}.log", threads)
    return steps_of_run(folder / name)


def learned(folder: Path, overrides: list[str], threads: int) -> list[Row]:
    """Held-out accuracy before TRL's trainer has trained on April's rollouts, and after it."""
    run_example("trl_grpo", ["--output", str(folder / "trl")], folder, overrides, threads)
    lines = read_lines(folder / "trl_grpo/metrics.jsonl")
    found = [line["evaluation"]["accuracy"] for line in lines if "evaluation" in line]
    return [Row(f"trl_heldout_{when}", [found[at]], "accuracy") for when, at in (("first", 0), ("last", -1))]


def adapter_seconds(adapter: str, configuration: Path, tokens: int, threads: int) -> float:
    """Median time of an adapter's calls in a step whose samples have `tokens` together."""
    script = Path(__file__).with_name("adapter_times.py")
    log = configuration.with_name(f"{adapter}-times.log")
    execute([sys.executable, script, adapter, configuration, tokens], log, threads)
    return median(orjson.loads(log.read_bytes().splitlines()[-1]))


@dataclass(frozen=True)
class Gain:
    """The gain of a trainer from April's rollouts, and what explains it."""

    ratio: float
    """Speed of the trainer with April's rollouts over that on its own."""
    generation_share: float
    """g: share of generation in the trainer's own time."""
    engine_gain: float
    """s: April's tokens a second while it generates, over the trainer's own."""

    @property
    def possible(self) -> float:
        """The ratio if nothing but the speed of generation changed (Amdahl 1967)."""
        return 1 / (1 - self.generation_share + self.generation_share / self.engine_gain)

    @property
    def share(self) -> float:
        return self.ratio / self.possible

    def __str__(self) -> str:
        return (
            f"ratio {self.ratio:.2f}, generation {self.generation_share:.2f} of TRL's time, April generates "
            f"{self.engine_gain:.1f} times as fast: {self.possible:.2f} is possible, {self.share:.2f} of it arrives"
        )


def gain_of(run_dir: Path, log: Path) -> Gain:
    """The gain of TRL with April over TRL on its own, both without their first step."""
    ours, theirs = steps_of_run(run_dir), steps_of_trl(log)
    rollouts, lines = read_records(run_dir / "metrics.jsonl")[1:], read_lines(log)
    generated_s = lines[-1]["generation_s"] - lines[0]["generation_s"]
    own_speed = sum(theirs.tokens[1:]) / generated_s
    speed = sum(line["rollout_tokens"] for line in rollouts) / sum(line["rollout_s"] for line in rollouts)
    return Gain(
        ours.tokens_per_s / theirs.tokens_per_s, generated_s / (theirs.times[-1] - theirs.times[0]), speed / own_speed
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS, help=f"of each run [default {STEPS}]")
    arguments.add_argument("--seeds", type=int, default=SEEDS, help=f"of each [default {SEEDS}]")
    arguments.add_argument("--learns", action="store_true", help="only whether TRL's trainer learns the task, once")
    arguments.add_argument("--threads", type=int, default=CORES, help=f"of TRL's training [default {CORES}]")
    options = arguments.parse_args()
    steps, seeds = (3, 1) if options.quick else (options.steps, options.seeds)
    measured: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        policy = quickstart_policy(Path(name), quick=False)
        prompts, held_out = make_data(Path(name, "data"))
        inputs = ["--model.path", str(policy), "--data.path", str(prompts)]
        if options.learns:
            tested = ["--data.eval_path", str(held_out), "--evaluation.prompts", "256"]
            of_run = [*inputs, *tested, "--schedule.max_steps", str(3 if options.quick else LEARNING_STEPS)]
            return report(learned(Path(name), of_run, options.threads), options.json)
        for seed in range(seeds):
            folder = Path(name, str(seed))
            folder.mkdir()
            same = ["--schedule.max_steps", str(steps), *RANKS]
            of_seed = [*inputs, *same, "--seed", str(seed)]
            run_april(folder, policy, prompts, seed, same)
            found = {"april": steps_of_run(folder / f"april{seed}")}
            found["grpo"] = run_example("grpo", ["--checkpoint", str(folder / "grpo.pt")], folder, of_seed, threads=1)
            found["trl_grpo"] = run_example(
                "trl_grpo", ["--output", str(folder / "trl")], folder, of_seed, threads=options.threads
            )
            run_trl(folder, policy, prompts, seed, same, options.threads)
            found["trl"] = steps_of_trl(folder / f"trl{seed}.jsonl")
            for what, of in found.items():
                rewards = f"reward {of.rewards[0]:.3f} to {of.rewards[-1]:.3f}"
                print(f"seed {seed}: {what}: {of.tokens_per_s:,.0f} tokens/s, {of.step_s:.2f} s a step, {rewards}")
            measured["single_file_vs_april_learner"].append(found["grpo"].tokens_per_s / found["april"].tokens_per_s)
            gain = gain_of(folder / "trl_grpo", folder / f"trl{seed}.jsonl")
            print(f"seed {seed}: TRL with April: {gain}", flush=True)
            measured["trl_with_april_vs_trl"].append(gain.ratio)
            measured["trl_generation_share"].append(gain.generation_share)
            measured["trl_engine_gain"].append(gain.engine_gain)
            measured["trl_with_april_share"].append(gain.share)
            for adapter in ADAPTERS:
                tokens, path = int(median(found["trl_grpo"].tokens)), folder / "trl_grpo/config.toml"
                ours = adapter_seconds(adapter, path, tokens, options.threads)
                measured[f"adapter_overhead_{adapter}"].append(ours / found["trl_grpo"].step_s)
    report([Row(key, values, "x") for key, values in measured.items()], options.json)


if __name__ == "__main__":
    main()
