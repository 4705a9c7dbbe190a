"""The torch engine against batched `generate` of transformers: the same requests, one thread, alternating.

Forced lengths on both sides: nothing ends early. Both sample at temperature 1 from the full vocabulary; the
engine also records the log-probability of each token.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from common import Row, in_turns, parser, ratios, report
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from april.simulate.probe import load_folder_weights
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.embedded.engine import TorchEngine

SLOTS = 32
"""Slots of the engine, and rows of a `generate` batch."""
LONGEST_RESPONSE = 2048
LONGEST_PROMPT = 24


@dataclass(frozen=True)
class Work:
    prompts: list[np.ndarray]
    lengths: np.ndarray
    """Forced response lengths: int [n] (tokens)."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def equal_work(vocabulary: int, count: int, length: int, seed: int) -> Work:
    rng = np.random.default_rng(seed)
    return Work([random_prompt(rng, vocabulary, 16) for _ in range(count)], np.full(count, length))


def longtail_work(vocabulary: int, count: int, seed: int) -> Work:
    """Lognormal with σ = 1 and median 128, cut at 2,048; prompts of 8 to 24 tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(128), 1.0, count)).round(), 1, LONGEST_RESPONSE).astype(int)
    return Work([random_prompt(rng, vocabulary, rng.integers(8, LONGEST_PROMPT + 1)) for _ in lengths], lengths)


def random_prompt(rng: np.random.Generator, vocabulary: int, length: int) -> np.ndarray:
    return rng.integers(2, vocabulary, length).astype(np.int32)


def run_engine(engine: TorchEngine, work: Work) -> None:
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        engine.submit(Request(i, prompt, int(length), seed=i))
    received = np.zeros(len(work.prompts), int)
    while engine.live:
        for chunk in engine.step():
            received[chunk.id] += len(chunk.tokens)
    assert (received == work.lengths).all()


class RowLengths(StoppingCriteria):
    """Each row is done at its own length; the batch ends when all are."""

    def __init__(self, prompt_width: int, lengths: np.ndarray):
        self.ends = torch.from_numpy(prompt_width + lengths)

    def __call__(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


@torch.inference_mode()
def run_generate(model, work: Work) -> None:
    """Batches of 32 in arrival order, left-padded, each as long as its longest response."""
    for start in range(0, len(work.prompts), SLOTS):
        prompts, lengths = work.prompts[start : start + SLOTS], work.lengths[start : start + SLOTS]
        width = max(map(len, prompts))
        padded = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = int(lengths.max())
        output = model.generate(
            padded, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None,
            pad_token_id=0, use_cache=True, max_new_tokens=longest,
            stopping_criteria=StoppingCriteriaList([RowLengths(width, lengths)]),
        )  # fmt: skip
        assert output.shape[1] == width + longest


def quickstart_model(folder: str) -> None:
    """The quickstart policy's shape with random weights and room for long responses."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=71, hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def compare(name: str, ours: Callable, theirs: Callable, works: list[Work]) -> list[Row]:
    """Both sides on each piece of work, taking turns at going first."""
    speeds = {ours: [], theirs: []}
    for turn, work in enumerate(works):
        for side in in_turns(turn, ours, theirs):
            started_s = time.perf_counter()
            side(work)
            speeds[side].append(work.tokens / (time.perf_counter() - started_s))
    return [
        Row(name, ratios(speeds[ours], speeds[theirs]), "ratio"),
        Row(name.replace("torch_engine_vs_generate", "torch_engine"), speeds[ours], "tokens/s"),
        Row(name.replace("torch_engine_vs_generate", "generate"), speeds[theirs], "tokens/s"),
    ]


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--model", help="Hugging Face folder; none: the quickstart's shape with random weights")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or made
        if not options.model:
            quickstart_model(made)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        engine = TorchEngine(folder, slots=SLOTS, max_context=LONGEST_RESPONSE + LONGEST_PROMPT)
        engine.load_weights(Version(0, 0), load_folder_weights(folder))
    vocabulary = engine.shape.vocabulary

    def ours(work: Work) -> None:
        run_engine(engine, work)

    def theirs(work: Work) -> None:
        run_generate(model, work)

    for side in (ours, theirs):
        side(equal_work(vocabulary, SLOTS, 16, seed=99))
    equal_runs, longtail_runs, requests = (2, 1, 2 * SLOTS) if options.quick else (15, 3, 4 * SLOTS)
    rows = compare(
        "torch_engine_vs_generate", ours, theirs, [equal_work(vocabulary, SLOTS, 128, run) for run in range(equal_runs)]
    )
    rows += compare(
        "torch_engine_vs_generate_longtail",
        ours,
        theirs,
        [longtail_work(vocabulary, requests, run) for run in range(longtail_runs)],
    )
    report(rows, options.json)


if __name__ == "__main__":
    main()
