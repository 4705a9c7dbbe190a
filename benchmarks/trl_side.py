"""TRL's GRPOTrainer: whole runs on the quickstart's task, and single steps on responses that are given; and single
steps of its SFTTrainer.

    python benchmarks/trl_side.py SETTINGS.json LOG.jsonl

trains a run and writes a line {"step", "time", "reward", "tokens", "generation_s"} after each optimizer step: `time` in
Unix seconds, `tokens` generated and trained so far, `generation_s` spent in TRL's own generation so far.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import orjson
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from april.learner.batch import TrainingBatch
from april.workers.rewards.text import final_answer

STEP_ROWS, RUN_ROWS = 8, 32
"""Rows of a micro-batch: TRL's default in single steps, more in runs."""


def arguments(folder: str, rows: int, samples: int, **more) -> GRPOConfig:
    """Arguments that steps and runs have in common: April's loss, fp32, nothing reported or saved."""
    return GRPOConfig(
        output_dir=folder, per_device_train_batch_size=min(rows, samples),
        gradient_accumulation_steps=max(1, samples // rows), beta=0.0, epsilon=0.2, epsilon_high=0.28,
        loss_type="dapo", temperature=1.0, gradient_checkpointing=False, bf16=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip


# --- single steps -----------------------------------------------------------------------------------------------------


class Stopwatch(TrainerCallback):
    """Seconds of each optimizer step; after each, `between` is called."""

    def __init__(self, between: Callable[[], None]):
        self.between, self.seconds = between, []

    def on_step_begin(self, *_, **__) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.between()


def train_steps(
    model, vocabulary: int, batch: TrainingBatch, steps: int, lr: float, between: Callable[[], None]
) -> list[float]:
    """Seconds of each of `steps` of GRPOTrainer's optimizer steps over `batch`, generation replaced by a look-up."""
    stopwatch = Stopwatch(between)

    def given_responses(prompts: list[str], trainer) -> dict[str, list]:
        taken = defaultdict(int)
        samples = []
        for prompt in prompts:
            samples.append(batch.groups[int(prompt)][taken[prompt]])
            taken[prompt] += 1
        return {
            "prompt_ids": [sample.tokens[: sample.prompt_tokens].tolist() for sample in samples],
            "completion_ids": [sample.tokens[sample.prompt_tokens :].tolist() for sample in samples],
            "logprobs": [[[value] for value in sample.logprobs.tolist()] for sample in samples],
        }

    def reward(completion_ids: list[list[int]], **_) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments(
                folder, STEP_ROWS, len(batch.samples), num_generations=len(batch.groups[0]),
                max_completion_length=max(sample.response_tokens for sample in batch.samples), max_steps=steps,
                learning_rate=lr, lr_scheduler_type="constant", use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(batch.groups))]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0"),
            rollout_func=given_responses,
            callbacks=[stopwatch],
        )  # fmt: skip
        trainer.train()
    return stopwatch.seconds


def supervised_steps(
    model, rows: list[list[int]], row_tokens: int, steps: int, lr: float, between: Callable[[], None]
) -> tuple[list[float], float]:
    """Seconds of each of `steps` of SFTTrainer's optimizer steps on packed rows of token ids, all of them trained, and
    the mean number of tokens in a step. A step has as many packed sequences of `row_tokens` as `rows` need, each a
    micro-batch, which is what it computes fastest here."""
    stopwatch, sequences = Stopwatch(between), -(-sum(map(len, rows)) // row_tokens)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder, packing=True, max_length=row_tokens, per_device_train_batch_size=1,
                gradient_accumulation_steps=sequences, max_steps=steps, learning_rate=lr,
                lr_scheduler_type="constant", gradient_checkpointing=False, bf16=False, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows * (steps + 1)}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0"),
            callbacks=[stopwatch],
        )  # fmt: skip
        trainer.train()
        lengths = list(map(len, trainer.train_dataset["input_ids"]))
    return stopwatch.seconds, sequences * sum(lengths) / len(lengths)


# --- whole runs -------------------------------------------------------------------------------------------------------


class StepLog(TrainerCallback):
    def __init__(self, path: Path):
        self.path, self.tokens, self.generation_s = path, 0, 0.0
        self.rewards: list[float] = []

    def on_step_end(self, arguments, state, control, **_) -> None:
        line = {
            "step": state.global_step, "time": time.time(), "reward": sum(self.rewards) / len(self.rewards),
            "tokens": self.tokens, "generation_s": self.generation_s,
        }  # fmt: skip
        self.rewards.clear()
        with self.path.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


class TimedTrainer(GRPOTrainer):
    """Measures how long it generates."""

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

    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments(
                folder, RUN_ROWS, settings["groups"] * settings["group_size"], seed=settings["seed"],
                num_generations=settings["group_size"], max_completion_length=settings["max_response_tokens"],
                max_steps=settings["steps"], max_grad_norm=1.0, top_p=1.0, top_k=0,
                use_transformers_continuous_batching=True, use_cpu=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows]),
            processing_class=tokenizer,
            callbacks=[log],
            optimizers=optimizer_and_schedule(model, settings),
        )  # fmt: skip
        trainer.step_log = log
        trainer.train()


def optimizer_and_schedule(model: torch.nn.Module, settings: dict) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The learner's; the warm-up of transformers would give away the first step to a learning rate of 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], betas=settings["betas"], weight_decay=0.0, fused=True
    )
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, settings["warmup_steps"])))


if __name__ == "__main__":
    main(orjson.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
