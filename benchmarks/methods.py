"""What the methods beside a plain reward give, how far they are from their definitions, and what they cost.

Without `--runs` only the rows that take seconds are measured. `--runs distil` trains a teacher (a finished quickstart),
then for each seed the quickstart by GRPO, by distillation alone, and by the reverse KL over the whole vocabulary alone,
from the same warm start, evaluated at every step. `--runs self` trains it by GRPO with and without the policy under a
prompt that shows the answer as its own teacher.
`--runs gdpo` trains the quickstart with a second reward that is a hundred times as large, by GDPO and by the sum.
`--runs curriculum` trains it on prompts half of which are hopeless, drawn by difficulty and in order.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w
import torch
from common import (
    APRIL,
    ROOT,
    Row,
    environment_of,
    parser,
    process,
    quickstart_policy,
    ratios,
    read_lines,
    report,
    write_lines,
)
from method_references import gaps
from transformers import AutoModelForCausalLM
from trl_side import supervised_steps

from april.config import Config
from april.data.arithmetic import make_data
from april.data.conversations import Conversation
from april.learner.batch import TrainingBatch, TrainSample, decode, encode
from april.learner.conversations import as_sample
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from april.learner.trainer import Trainer
from april.observe.report.run_folder import read_run
from april.wire.message import Version

WANTED = 0.9
"""Held-out accuracy that both sides have to reach."""
SEEDS, STEPS, STEPS_APART, REPEATS = 5, 64, 16, 9
ENDED = (0, 130, -signal.SIGINT)
"""Exit statuses of a run that ended by itself or as it was asked to; the last if its interpreter was just ending."""
END_S = 120.0
"""Time within which a run that is asked to stop has ended."""
HALVES_PROMPTS = 128
"""Prompts of the task of which half are hopeless: few enough for an epoch to end within two steps. What a sampler
knows is of earlier epochs."""
GROUPS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 12, 64
SFT_ROWS, PACKED_TOKENS = 32, 1024
HELD = {"advantage": "no_reward", "divergence": "reverse_kl"}
SELF_TAUGHT = {"divergence": "forward_kl", "divergence_coef": 0.1, "hint": "{label}#{prompt}"}
DISTILLED = {"advantage": "no_reward", "distillation": "reverse_kl", "distillation_discount": 0.0}
SMALL_BATCHES = {"rollout_batch_size": 16, "over_sampling_batch_size": 24, "n_samples_per_prompt": 2}
"""Batches of distillation, an eighth of GRPO's: a number for each token needs neither groups nor many samples."""


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--runs", nargs="*", choices=RUNS, default=(), help="train these alone: minutes a seed")
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    arguments.add_argument("--folder", type=Path, help="keep runs here, and take those that have ended from there")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="april-methods-") as made:
        folder = (options.folder or Path(made)).resolve()
        policy = quickstart_policy(folder, options.quick)
        repeats = 3 if options.quick else REPEATS
        rows = list[Row]()
        for name in options.runs:
            (folder / name).mkdir(parents=True, exist_ok=True)
            rows += RUNS[name](Runs(policy, folder / name, options.seeds, options.quick))
        if not options.runs:
            rows = [
                Row("reference_gap", list(gaps(np.random.default_rng(0))), "", of=max),
                token_scores_cost(policy, folder, repeats),
                sft_step_vs_trl(policy, folder, repeats),
            ]
    report(rows, options.json)


# --- rows of seconds --------------------------------------------------------------------------------------------------


def token_scores_cost(policy: Path, folder: Path, repeats: int) -> Row:
    """Seconds that a batch's token scores take of the learner, over those of its step: to share the batch with the
    ranks, and to make a teacher's column of it. The same samples with and without them, in turns."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    rng = np.random.default_rng(0)
    plain = TrainingBatch(0, [[sample(rng, reward) for reward in range(SAMPLES)] for _ in range(GROUPS)])
    scored = TrainingBatch(
        0, [[replace(each, token_scores={"big": each.logprobs}) for each in g] for g in plain.groups]
    )
    objective = Objective(configured(policy, folder), SingleRank())
    without = Objective(configured(policy, folder, distillation=""), SingleRank())
    trainer = Trainer(configured(policy, folder, distillation=""), torch.device("cpu"))
    taken: dict[str, list[float]] = {"plain": [], "scored": [], "step": []}
    for _ in range(repeats):
        taken["plain"].append(seconds(lambda: handle(without, plain)))
        taken["scored"].append(seconds(lambda: handle(objective, scored)))
        taken["step"].append(seconds(lambda: trainer.step(plain)))
    torch.distributed.destroy_process_group()
    extra = [max(0.0, scored - plain) for scored, plain in zip(taken["scored"], taken["plain"], strict=True)]
    return Row("token_scores_cost", ratios(extra, taken["step"]), "of a step")


def sft_step_vs_trl(policy: Path, folder: Path, repeats: int) -> Row:
    """Tokens a second of a supervised step over those of TRL's SFTTrainer with packing: the same model and rows of
    long-tailed lengths, all tokens trained, a step of each in turns. The first step of each is left out."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(128), 1, SFT_ROWS), 2, PACKED_TOKENS).astype(int)
    rows = [rng.integers(3, 20, length).astype(np.int32) for length in lengths]
    whole = [Conversation(row, np.arange(len(row)) > 0) for row in rows]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    config = supervised(policy, folder)
    trainer, taken = Trainer(config, torch.device("cpu")), list[float]()

    def step() -> None:
        batch = TrainingBatch(trainer.step_count, [[as_sample(row, i, 0)] for i, row in enumerate(whole)])
        taken.append(seconds(lambda: trainer.step(batch)))

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    theirs, their_tokens = supervised_steps(
        model, [row.tolist() for row in rows], PACKED_TOKENS, repeats + 1, config.learner.lr, step
    )
    torch.distributed.destroy_process_group()
    ours = [sum(map(len, rows)) / spent for spent in taken[1:]]
    return Row("sft_step_vs_trl", ratios(ours, [their_tokens / spent for spent in theirs[1:]]), "")


def supervised(policy: Path, folder: Path) -> Config:
    learner = {"device": "cpu", "lr": 1e-4, "microbatch_tokens": PACKED_TOKENS}
    tree = {"model": {"path": policy}, "data": {"path": "unused.jsonl"}, "run": {"dir": folder}, "learner": learner}
    return Config.model_validate(tree | {"samples": {"every": 0}}).supervised()


def handle(objective: Objective, batch: TrainingBatch) -> None:
    prepared = objective.prepare(decode(encode(batch)))
    tokens = objective.tokens(prepared, list(range(len(prepared.samples))), torch.device("cpu"))
    objective.distilled(tokens, tokens.behaviour_logprobs)


def sample(rng: np.random.Generator, reward: float) -> TrainSample:
    tokens = rng.integers(3, 20, PROMPT_TOKENS + RESPONSE_TOKENS).astype(np.int32)
    logprobs = -rng.exponential(1.0, RESPONSE_TOKENS).astype(np.float32)
    return TrainSample(tokens, PROMPT_TOKENS, logprobs, reward, ((0, RESPONSE_TOKENS, Version(0, 0)),))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def configured(policy: Path, folder: Path = Path(), **algorithm) -> Config:
    tree = {"model": {"path": policy}, "data": {"path": "unused.jsonl"}, "teacher": {"big": {"path": policy}}}
    run = {"run": {"dir": folder}, "learner": {"device": "cpu"}}
    return Config.model_validate(tree | run | {"algorithm": {"entropy_coef": 1e-9} | DISTILLED | algorithm})


# --- runs -------------------------------------------------------------------------------------------------------------


def distillation(runs: "Runs") -> list[Row]:
    """Samples to the wanted accuracy on held-out prompts: of distillation, with the teacher at scorers and in the
    learner, of GRPO, and the shares of the first two."""
    teacher = runs.train("teacher", 0, 32, {}) / "checkpoints/policy"
    distil = {"algorithm": DISTILLED, "reward": {"where": "scorer"}, "teacher": {"big": {"path": teacher}}}
    divergence = {"algorithm": HELD, "teacher": {"big": {"path": teacher, "where": "learner"}}}
    batches = {"schedule": SMALL_BATCHES}
    samples = runs.samples_to(WANTED, {"grpo": {}, "distil": distil | batches, "divergence": divergence | batches})
    return [
        Row("distil_samples_share", ratios(samples["distil"], samples["grpo"]), ""),
        Row("divergence_samples_share", ratios(samples["divergence"], samples["grpo"]), ""),
        *(Row(f"samples_to_accuracy_{name}", found, "samples") for name, found in samples.items()),
    ]


def self_distillation(runs: "Runs") -> list[Row]:
    """Accuracy on held-out prompts after a few steps: of GRPO with the policy as its own teacher, less that of GRPO."""
    return accuracy_gain("self_distil_gain", runs, {"self": {"algorithm": SELF_TAUGHT}, "grpo": {}})


BRIEF = """
def brief(tokens):
    return 100.0 * (1.0 - tokens / 64)
"""
"""A reward for short responses, whose spread is some hundred times that of right and wrong."""
BRIEF_WEIGHT = 0.1
"""Weight of brevity beside a right answer's 1. With equal weights both sides end without right answers: a response
without steps is the shortest."""


def apart(runs: "Runs") -> list[Row]:
    """Accuracy on held-out prompts after a few steps on two rewards, of which the second is of a hundred times the
    scale and a tenth of the weight: of GDPO less that of the sum."""
    (runs.folder / "brief_reward.py").write_text(BRIEF)
    reward = {"part": {"correct": {}, "brief": {"verifier": "brief_reward:brief", "weight": BRIEF_WEIGHT}}}
    advantages = {"gdpo": "gdpo", "sum": "grpo"}
    arms = {name: {"reward": reward, "algorithm": {"advantage": its}} for name, its in advantages.items()}
    return accuracy_gain("gdpo_vs_sum", runs, arms)


def accuracy_gain(name: str, runs: "Runs", arms: dict[str, dict]) -> list[Row]:
    """The accuracy after a few steps of the first side less that of the second, and both."""
    accuracies = runs.by_seed(arms, STEPS_APART, lambda run: read_run(run).evaluation[-1]["accuracy"])
    ours, theirs = accuracies.values()
    return [
        Row(name, [a - b for a, b in zip(ours, theirs, strict=True)], "of held-out prompts"),
        *(Row(f"accuracy_{side}", found, "of held-out prompts") for side, found in accuracies.items()),
    ]


def curriculum(runs: "Runs") -> list[Row]:
    """Samples, discarded ones included, to an accuracy on held-out prompts, half of which are hopeless as half of the
    training prompts are: of the sampler `difficulty` over the fixed order, both with the filter of groups without
    spread."""
    prompts, held_out = map(with_hopeless, make_data(runs.folder / "halves", HALVES_PROMPTS, 512))
    data = {"path": prompts, "eval_path": held_out}
    schedules = {name: {"sampler": name, "dynamic_sampling": not runs.quick} for name in ("order", "difficulty")}
    arms = {name: {"data": data, "schedule": schedule} for name, schedule in schedules.items()}
    samples = runs.samples_to(WANTED / 2, arms, of_discarded=SAMPLES)
    return [
        Row("curriculum_samples_share", ratios(samples["difficulty"], samples["order"]), ""),
        *(Row(f"samples_to_accuracy_{name}", found, "samples") for name, found in samples.items()),
    ]


def with_hopeless(path: Path) -> Path:
    """A file with the rows of another, every second of which nobody can solve."""
    rows = read_lines(path)
    hopeless = [row | {"label": "none"} if number % 2 else row for number, row in enumerate(rows)]
    return write_lines(path.with_stem(f"{path.stem}_half"), hopeless)


@dataclass(frozen=True)
class Runs:
    """Runs of the quickstart's configuration with other sections in a folder; quick ones are two steps of one seed."""

    policy: Path
    folder: Path
    seeds: int
    quick: bool

    def samples_to(self, wanted: float, arms: dict[str, dict], of_discarded: int = 0) -> dict[str, list[float]]:
        """Samples until each side has the wanted accuracy, by name and seed."""
        wanted = 0.0 if self.quick else wanted
        return self.by_seed(arms, STEPS, lambda run: samples_to(run, wanted, of_discarded), wanted)

    def by_seed(
        self, arms: dict[str, dict], steps: int, figure: Callable[[Path], float], wanted: float = 2.0
    ) -> dict[str, list[float]]:
        """A figure of each side's runs, by name and seed. The sides, given as their changes, take turns."""
        found: dict[str, list[float]] = {name: [] for name in arms}
        for seed in range(1, 1 + (1 if self.quick else self.seeds)):
            for name, changes in arms.items():
                found[name].append(figure(self.train(f"{name}-{seed}", seed, steps, changes, wanted)))
        return found

    def train(self, name: str, seed: int, steps: int, changes: dict, wanted: float = 2.0) -> Path:
        """A run that is stopped once it has the wanted accuracy on held-out prompts; returns its folder."""
        run, ended = self.folder / name, self.folder / f"{name}.ended"
        if ended.exists():
            return run
        prompts, held_out = make_data(self.folder / "data")
        tree = tomllib.loads((ROOT / "configs/quickstart.toml").read_text())
        tree |= {"seed": seed, "run": {"dir": str(self.folder), "name": name}, "model": {"path": str(self.policy)}}
        tree["data"] = {"path": str(prompts), "eval_path": str(held_out)}
        tree["schedule"] |= {"max_steps": 2 if self.quick else steps}
        tree["evaluation"] |= {"every": 1} | ({"prompts": 16} if self.quick else {})
        if self.quick:
            tree["schedule"] |= {"rollout_batch_size": 4, "over_sampling_batch_size": 6}
            tree["sampling"]["max_response_tokens"] = 64
        for key, section in changes.items():
            tree[key] = tree.get(key, {}) | section
        path, log = self.folder / f"{name}.toml", self.folder / f"{name}.log"
        path.write_text(tomli_w.dumps(plain(tree)))
        shutil.rmtree(run, ignore_errors=True)
        print(f"{name} begins", file=sys.stderr)
        with process([*APRIL, "run", path], log, env=environment_of(1), cwd=ROOT) as started:
            while started.poll() is None and steps_to(run, wanted) is None:
                time.sleep(5)
            started.send_signal(signal.SIGINT)
            started.wait(END_S)
        if started.returncode not in ENDED:
            sys.exit(f"{name} ended with status {started.returncode}:\n{log.read_text()[-3000:]}")
        ended.touch()
        return run


def plain(tree: dict) -> dict:
    """A tree of which paths are texts, as TOML has no paths."""
    return {key: plain(value) if isinstance(value, dict) else value if not isinstance(value, Path) else str(value)
            for key, value in tree.items()}  # fmt: skip


def steps_to(run_folder: Path, wanted: float) -> int | None:
    """Steps until the weights have the wanted accuracy on held-out prompts; `None` while they do not have it."""
    if not (run_folder / "summary.json").exists():
        return None
    reached = [point["step"] for point in read_run(run_folder).evaluation if point["accuracy"] >= wanted]
    return next((step for step in reached if step), None)


def samples_to(run_folder: Path, wanted: float, of_discarded: int = 0) -> float:
    """Samples trained until the weights have the wanted accuracy on held-out prompts, and `of_discarded` for each group
    discarded until then; infinite if they never have it."""
    steps_taken = steps_to(run_folder, wanted)
    if steps_taken is None:
        return float("inf")
    steps = read_run(run_folder).steps[:steps_taken]
    return float(sum(step["samples"] for step in steps) + of_discarded * sum(steps[-1]["discarded_groups"].values()))


RUNS = {"distil": distillation, "self": self_distillation, "gdpo": apart, "curriculum": curriculum}
"""Comparisons of whole runs, by name."""


if __name__ == "__main__":
    main()
