"""`generate` of transformers with a static cache that it compiles, in a process of its own.

Compiling takes most of a minute, and hardly any of the device: so it goes on while others are measured, and batches are
timed when nothing else runs. One cache serves all batches, so nothing is compiled or captured twice; a batch ends at
its longest response. Reads lines with JSON lists of lengths (tokens), and answers each with the seconds of that batch.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import argparse
import json
import os
import time

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")  # the other cores belong to who is measured

import part  # noqa: F401  puts april on sys.path
import torch
from transformers import AutoModelForCausalLM, StaticCache, StoppingCriteria, StoppingCriteriaList

from april.util.lifetime import end_with_parent

WARM_TOKENS = 6
"""Responses with which everything is compiled and captured; a few more than captures take."""


class EndsAt(StoppingCriteria):
    """All rows end at the same length, and none before."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("folder")
    arguments.add_argument("--device", required=True)
    for name in ("rows", "prompt", "longest", "vocabulary"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    given = arguments.parse_args()
    end_with_parent()
    if given.device == "cpu":
        torch.set_num_threads(1)
    began, device = time.monotonic(), torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    torch.manual_seed(0)
    ids = torch.randint(2, given.vocabulary, (given.rows, given.prompt), device=device)
    cache = StaticCache(config=model.config, max_cache_len=given.prompt + given.longest)

    @torch.inference_mode()
    def seconds_of(longest: int) -> float:
        """Time of a batch whose longest response has so many tokens."""
        cache.reset()
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=None, pad_token_id=0, past_key_values=cache, max_new_tokens=given.longest,
            stopping_criteria=StoppingCriteriaList([EndsAt(given.prompt + longest)]),
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert output.shape[1] >= given.prompt + longest, output.shape
        return time.perf_counter() - started

    for _ in range(2):
        seconds_of(min(WARM_TOKENS, given.longest))
    print(json.dumps({"ready": time.monotonic() - began}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds_of(max(json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main()
