"""Other trainers on April's rollouts: a single file against April's learner, TRL with April against TRL alone.

All on the quickstart's policy, prompts and verifier, each on the whole machine by itself, one process of training. A
speed is trained tokens a second from the end of the first step to the end of the last: starting up is left out.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import orjson
from common import Row, parser, report
from end_to_end import CORES, ROOT, configuration_file, execute, run_april, run_trl

from april import config as configuration
from april.config import Config
from april.data.make_data import make_data
from april.learner.batch import Batch, TrainSample
from april.policy.make_policy import make_policy
from april.wire.version import Version

STEPS, SEEDS, REPEATS = 8, 3, 5
RANKS = ["--learner.ranks", "1"]


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


def read_lines(path: Path) -> list[dict]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def steps_of_run(run_dir: Path) -> Steps:
    lines = read_lines(run_dir / "metrics.jsonl")
    return Steps(*([line[key] for line in lines] for key in ("time", "reward", "tokens")))


def steps_of_trl(log: Path) -> Steps:
    """Its tokens are counted from the start."""
    lines = read_lines(log)
    tokens = np.diff([0, *(line["tokens"] for line in lines)]).tolist()
    return Steps([line["time"] for line in lines], [line["reward"] for line in lines], tokens)


def run_example(name: str, output: list[str], folder: Path, overrides: list[str], threads: int) -> Steps:
    """`examples/NAME.py` as it is, on so many threads, as what it is compared with."""
    chosen = ["--run.dir", str(folder), "--run.name", name, *output, "--save-every", "1000"]
    command = [sys.executable, str(ROOT / f"examples/{name}.py"), str(configuration_file(folder)), *chosen, *overrides]
    execute(command, folder / f"{name}.log", threads)
    return steps_of_run(folder / name)


def adapter_seconds(config: Config, tokens: int) -> float:
    """Median time that what stands between April and TRL takes in a step whose samples have `tokens` together: the
    batch as tensors and as TRL's lists, the canary, and copies of the weights."""
    from transformers import AutoModelForCausalLM

    from april.adapters.trl import described
    from april.rollouts.batch import to_tensors
    from april.rollouts.weights import canary_of, collect

    size = config.schedule.n_samples_per_prompt
    length = tokens // (config.schedule.rollout_batch_size * size)
    sample = TrainSample(
        np.ones(20 + length, np.int32), 20, np.zeros(length, np.float32), 1.0, ((0, length, Version(0, 0)),)
    )
    batch = Batch(0, [[sample] * size] * config.schedule.rollout_batch_size)
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        described([sample for group in to_tensors(batch, config.algorithm.advantage).groups for sample in group])
        canary_of(model, config)
        collect(model)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS, help=f"of each run [default {STEPS}]")
    arguments.add_argument("--seeds", type=int, default=SEEDS, help=f"of each [default {SEEDS}]")
    options = arguments.parse_args()
    steps, seeds = (2, 1) if options.quick else (options.steps, options.seeds)
    measured: dict[str, list[float]] = {
        name: [] for name in ("single_file_vs_april_learner", "adapter_overhead", "trl_with_april_vs_trl")
    }
    with tempfile.TemporaryDirectory() as name:
        policy = make_policy(ROOT / "cache/policy")
        prompts, _ = make_data(Path(name, "data"))
        inputs = ["--model.path", str(policy), "--data.path", str(prompts)]
        for seed in range(seeds):
            folder = Path(name, str(seed))
            folder.mkdir()
            same = ["--schedule.max_steps", str(steps), *RANKS]
            of_seed = [*inputs, *same, "--seed", str(seed)]
            run_april(folder, policy, prompts, seed, same)
            found = {"april": steps_of_run(folder / f"april{seed}")}
            found["grpo"] = run_example("grpo", ["--checkpoint", str(folder / "grpo.pt")], folder, of_seed, threads=1)
            found["trl_grpo"] = run_example(
                "trl_grpo", ["--output", str(folder / "trl")], folder, of_seed, threads=CORES
            )
            run_trl(folder, policy, prompts, seed, same, "continuous")
            found["trl"] = steps_of_trl(folder / f"trl{seed}.jsonl")
            for what, of in found.items():
                rewards = f"reward {of.rewards[0]:.3f} to {of.rewards[-1]:.3f}"
                print(f"seed {seed}: {what}: {of.tokens_per_s:,.0f} tokens/s, {of.step_s:.2f} s a step, {rewards}")
            config = configuration.load(configuration_file(folder), of_seed)
            ours = adapter_seconds(config, int(median(found["trl_grpo"].tokens)))
            measured["single_file_vs_april_learner"].append(found["grpo"].tokens_per_s / found["april"].tokens_per_s)
            measured["adapter_overhead"].append(ours / found["trl_grpo"].step_s)
            measured["trl_with_april_vs_trl"].append(found["trl_grpo"].tokens_per_s / found["trl"].tokens_per_s)
    report([Row(key, values, "x") for key, values in measured.items()], options.json)


if __name__ == "__main__":
    main()
