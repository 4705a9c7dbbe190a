"""TRL's GRPOTrainer on responses that are given, for comparisons of one training step."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from april.learner.batch import TrainingBatch

ROWS = 8
"""of a micro-batch, TRL's default"""


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0")


class Stopwatch(TrainerCallback):
    """Seconds of each optimizer step; after each, `between` is called."""

    def __init__(self, between: Callable[[], None]):
        self.between, self.seconds = between, []

    def on_step_begin(self, *_, **__) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.between()


def train_steps(model, vocabulary: int, batch: TrainingBatch, steps: int, lr: float, between: Callable[[], None]) -> list:
    """Seconds of each of `steps` of GRPOTrainer's optimizer steps over `batch`, generation replaced by a look-up."""
    size = len(batch.groups[0])
    longest = max(sample.response_tokens for sample in batch.samples)
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

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=len(batch.samples) // ROWS,
            num_generations=size,
            max_completion_length=longest,
            max_steps=steps,
            learning_rate=lr,
            lr_scheduler_type="constant",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            temperature=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(batch.groups))]}),
            processing_class=word_tokenizer(vocabulary),
            rollout_func=given_responses,
            callbacks=[stopwatch],
        )
        trainer.train()
    return stopwatch.seconds
