"""What the methods beside a plain reward give: on-policy distillation, parts of a reward normalised apart, what token
scores cost, and supervised steps.

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
from dataclasses import replace
from pathlib import Path

import numpy as np
import tomli_w
import torch
from common import (
    APRIL,
    ROOT,
    Row,
    parser,
    process,
    python_path,
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
INTERRUPTED = 130
"""Exit status of a run that ended as it was asked to."""
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
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        policy = quickstart_policy(folder, options.quick)
        repeats = 3 if options.quick else REPEATS
        rows = [row for name in options.runs for row in RUNS[name](policy, folder, options.seeds, options.quick)]
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


def distillation(policy: Path, folder: Path, seeds: int, quick: bool) -> list[Row]:
    """Samples to the wanted accuracy on held-out prompts: of distillation, with the teacher at scorers and in the
    learner, of GRPO, and the shares of the first two."""
    train(folder, "teacher", policy, 0, 2 if quick else 32, {}, quick)
    teacher = folder / "teacher/checkpoints/policy"
    samples: dict[str, list[float]] = {"grpo": [], "distil": [], "divergence": []}
    for seed in range(1, 1 + (1 if quick else seeds)):
        for name, found in samples.items():
            changes = {}
            if name == "distil":
                changes = {"algorithm": DISTILLED, "reward": {"where": "scorer"}, "teacher": {"big": {"path": teacher}}}
                changes |= {"schedule": SMALL_BATCHES}
            if name == "divergence":
                changes = {"algorithm": HELD, "teacher": {"big": {"path": teacher, "where": "learner"}}}
                changes |= {"schedule": SMALL_BATCHES}
            wanted = 0.0 if quick else WANTED
            run = train(folder, f"{name}-{seed}", policy, seed, 2 if quick else STEPS, changes, quick, wanted)
            found.append(samples_to(run, wanted))
    return [
        Row("distil_samples_share", ratios(samples["distil"], samples["grpo"]), ""),
        Row("divergence_samples_share", ratios(samples["divergence"], samples["grpo"]), ""),
        *(Row(f"samples_to_accuracy_{name}", found, "samples") for name, found in samples.items()),
    ]


def self_distillation(policy: Path, folder: Path, seeds: int, quick: bool) -> list[Row]:
    """Accuracy on held-out prompts after a few steps: of GRPO with the policy as its own teacher, less that of GRPO."""
    accuracies: dict[str, list[float]] = {"grpo": [], "self": []}
    for seed in range(1, 1 + (1 if quick else seeds)):
        for name, found in accuracies.items():
            changes = {"algorithm": SELF_TAUGHT} if name == "self" else {}
            run = train(folder, f"self-{name}-{seed}", policy, seed, 2 if quick else STEPS_APART, changes, quick)
            found.append(read_run(run).evaluation[-1]["accuracy"])
    gains = [taught - plain for taught, plain in zip(accuracies["self"], accuracies["grpo"], strict=True)]
    return [
        Row("self_distil_gain", gains, "of held-out prompts"),
        *(Row(f"accuracy_{name}", found, "of held-out prompts") for name, found in accuracies.items()),
    ]


BRIEF = """
def brief(tokens):
    return 100.0 * (1.0 - tokens / 64)
"""
"""A reward for short responses, whose spread is some hundred times that of right and wrong."""
BRIEF_WEIGHT = 0.1
"""Weight of brevity beside a right answer's 1. With equal weights both sides end without right answers: a response
without steps is the shortest."""


def apart(policy: Path, folder: Path, seeds: int, quick: bool) -> list[Row]:
    """Accuracy on held-out prompts after a few steps on two rewards, of which the second is of a hundred times the
    scale and a tenth of the weight: of GDPO less that of the sum."""
    (folder / "brief_reward.py").write_text(BRIEF)
    parts = {"correct": {}, "brief": {"verifier": "brief_reward:brief", "weight": BRIEF_WEIGHT}}
    accuracies: dict[str, list[float]] = {"gdpo": [], "sum": []}
    for seed in range(1, 1 + (1 if quick else seeds)):
        for name, found in accuracies.items():
            changes = {"reward": {"part": parts}, "algorithm": {"advantage": "gdpo" if name == "gdpo" else "grpo"}}
            run = train(folder, f"gdpo-{name}-{seed}", policy, seed, 2 if quick else STEPS_APART, changes, quick)
            found.append(read_run(run).evaluation[-1]["accuracy"])
    return [
        Row("gdpo_vs_sum", [a - b for a, b in zip(*accuracies.values(), strict=True)], "of held-out prompts"),
        *(Row(f"accuracy_{name}", found, "of held-out prompts") for name, found in accuracies.items()),
    ]


def curriculum(policy: Path, folder: Path, seeds: int, quick: bool) -> list[Row]:
    """Samples, discarded ones included, to an accuracy on held-out prompts, half of which are hopeless as half of the
    training prompts are: of the sampler `difficulty` over the fixed order, both with the filter of groups without
    spread."""
    prompts, held_out = map(with_hopeless, make_data(folder / "halves", HALVES_PROMPTS, 512))
    data = {"path": prompts, "eval_path": held_out}
    samples: dict[str, list[float]] = {"order": [], "difficulty": []}
    for seed in range(1, 1 + (1 if quick else seeds)):
        for name, found in samples.items():
            changes = {"data": data, "schedule": {"sampler": name, "dynamic_sampling": not quick}}
            wanted = 0.0 if quick else WANTED / 2
            most = 2 if quick else STEPS
            run = train(folder, f"curriculum-{name}-{seed}", policy, seed, most, changes, quick, wanted)
            found.append(samples_to(run, wanted, SAMPLES))
    return [
        Row("curriculum_samples_share", ratios(samples["difficulty"], samples["order"]), ""),
        *(Row(f"samples_to_accuracy_{name}", found, "samples") for name, found in samples.items()),
    ]


def with_hopeless(path: Path) -> Path:
    """A file with the rows of another, every second of which nobody can solve."""
    rows = read_lines(path)
    hopeless = [row | {"label": "none"} if number % 2 else row for number, row in enumerate(rows)]
    return write_lines(path.with_stem(f"{path.stem}_half"), hopeless)


def train(
    folder: Path, name: str, policy: Path, seed: int, steps: int, changes: dict, quick: bool, wanted: float = 2.0
) -> Path:
    """A run of the quickstart's configuration with other sections, which is stopped once it has the wanted accuracy on
    held-out prompts; returns its folder."""
    ended = folder / f"{name}.ended"
    if ended.exists():
        return folder / name
    prompts, held_out = make_data(folder / "data")
    tree = tomllib.loads((ROOT / "configs/quickstart.toml").read_text())
    tree |= {"seed": seed, "run": {"dir": str(folder), "name": name}, "model": {"path": str(policy)}}
    tree["data"] = {"path": str(prompts), "eval_path": str(held_out)}
    tree["schedule"] |= {"max_steps": steps}
    tree["evaluation"] |= {"every": 1} | ({"prompts": 16} if quick else {})
    if quick:
        tree["schedule"] |= {"rollout_batch_size": 4, "over_sampling_batch_size": 6}
        tree["sampling"]["max_response_tokens"] = 64
    path = folder / f"{name}.toml"
    for key, section in changes.items():
        tree[key] = tree.get(key, {}) | section
    path.write_text(tomli_w.dumps(plain(tree)))
    shutil.rmtree(folder / name, ignore_errors=True)
    print(f"{name} begins", file=sys.stderr)
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    log = folder / f"{name}.log"
    with process([*APRIL, "run", path], log, env=environment, cwd=ROOT) as started:
        while started.poll() is None and steps_to(folder / name, wanted) is None:
            time.sleep(5)
        started.send_signal(signal.SIGINT)
        started.wait(END_S)
    if started.returncode not in (0, INTERRUPTED):
        sys.exit(f"{name} ended with status {started.returncode}:\n{log.read_text()[-3000:]}")
    ended.touch()
    return folder / name


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
