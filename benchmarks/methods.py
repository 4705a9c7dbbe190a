"""What token scores cost a step, and a supervised step beside TRL's."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import Row, parser, quickstart_policy, ratios, report
from transformers import AutoModelForCausalLM
from trl_side import supervised_steps

from april.config import Config
from april.data.conversations import Conversation
from april.learner.batch import TrainingBatch, TrainSample, decode, encode
from april.learner.conversations import as_sample
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from april.learner.trainer import Trainer
from april.wire.message import Version

REPEATS = 9
GROUPS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 12, 64
SFT_ROWS, PACKED_TOKENS = 32, 1024
DISTILLED = {"advantage": "no_reward", "distillation": "reverse_kl", "distillation_discount": 0.0}


def main() -> None:
    options = parser(__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="april-methods-") as made:
        folder = Path(made)
        policy, repeats = quickstart_policy(folder, options.quick), 3 if options.quick else REPEATS
        rows = [token_scores_cost(policy, folder, repeats), sft_step_vs_trl(policy, folder, repeats)]
    report(rows, options.json)


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


if __name__ == "__main__":
    main()
