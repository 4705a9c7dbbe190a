"""TRL's GRPOTrainer on the quickstart's policy, prompts and verifier; a process of its own.

    python benchmarks/trl_run.py SETTINGS.json LOG.jsonl

Writes a line {"step", "time", "reward", "tokens", "generation_s"} after each optimizer step, `time` in Unix seconds,
`tokens` generated and trained so far, `generation_s` spent in TRL's own generation so far.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import sys
import tempfile
import time
from pathlib import Path

import orjson
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from april.workers.rewards.text import final_answer

ROWS = 32
"""of a micro-batch"""


class StepLog(TrainerCallback):
    def __init__(self, path: Path):
        self.path, self.tokens, self.generation_s = path, 0, 0.0
        self.rewards: list[float] = []

    def on_step_end(self, arguments, state, control, **_) -> None:
        line = {
            "step": state.global_step,
            "time": time.time(),
            "reward": sum(self.rewards) / len(self.rewards),
            "tokens": self.tokens,
            "generation_s": self.generation_s,
        }
        self.rewards.clear()
        with self.path.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


class TimedTrainer(GRPOTrainer):
    """Says how long it generates."""

    step_log: StepLog

    def _generate_single_turn(self, *given):
        began = time.perf_counter()
        answer = super()._generate_single_turn(*given)
        self.step_log.generation_s += time.perf_counter() - began
        return answer


def main(settings: dict, log_path: Path) -> None:
    torch.set_num_threads(settings["threads"])
    log = StepLog(log_path)
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"])
    rows = [orjson.loads(line) for line in Path(settings["prompts"]).read_bytes().splitlines()]

    def reward(completions, completion_ids, label, **_) -> list[float]:
        ends = ["stop" if ids and ids[-1] == tokenizer.eos_token_id else "length" for ids in completion_ids]
        log.tokens += sum(map(len, completion_ids))
        found = [
            final_answer(completion[0]["content"], answer, end)
            for completion, answer, end in zip(completions, label, ends, strict=True)
        ]
        log.rewards += found
        return found

    samples = settings["groups"] * settings["group_size"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            seed=settings["seed"],
            per_device_train_batch_size=min(ROWS, samples),
            gradient_accumulation_steps=max(1, samples // ROWS),
            num_generations=settings["group_size"],
            max_completion_length=settings["max_response_tokens"],
            max_steps=settings["steps"],
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            use_transformers_continuous_batching=settings["backend"] == "continuous",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
        trainer = TimedTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows]),
            processing_class=tokenizer,
            callbacks=[log],
            optimizers=optimizer_and_schedule(model, settings),
        )
        trainer.step_log = log
        trainer.train()


def optimizer_and_schedule(model: torch.nn.Module, settings: dict) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """As the learner has them; the warm-up of transformers would give away the first step to a learning rate of 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], betas=settings["betas"], weight_decay=0.0, fused=True
    )
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, settings["warmup_steps"])))


if __name__ == "__main__":
    main(orjson.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
