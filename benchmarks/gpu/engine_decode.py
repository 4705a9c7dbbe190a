"""The torch engine on a GPU: its decode step against the memory's bandwidth, `generate` of transformers with a compiled
static cache, and a bare loop. Random weights of Qwen3-0.6B's shape in bf16; every response has its forced length.

The limit of a decode step reads all weights and the keys and values of every context once, at the speed of a copy on
the same device.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from part import QWEN3_SHAPES, Part, make_model
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from april.simulate.probe import load_folder_weights
from april.wire.message import Version
from april.workers.engines.base import Chunk, Request
from april.workers.engines.embedded.engine import TorchEngine

V0 = Version(0, 0)


@dataclass(frozen=True)
class Scale:
    shape: str
    slots: tuple[int, ...]
    context: int
    """Tokens of a prompt where the bandwidth is measured."""
    steps: int
    """Decode steps that are timed."""
    rows: int
    """Rows of a `generate` batch, and slots of the engine beside it."""
    prompt: int
    response: int
    """Tokens of a prompt and of a response beside `generate`."""
    median: int
    longest: int
    """Median and cut of the long-tailed lengths (lognormal with σ = 1)."""


FULL = Scale(
    "0.6B", (256, 32, 128), context=1024, steps=64, rows=128, prompt=128, response=256, median=128, longest=1024
)
TINY = Scale("tiny", (4, 2), context=100, steps=4, rows=4, prompt=12, response=8, median=8, longest=24)


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n\n")[0])
    scale = TINY if part.tiny else FULL
    dtype = torch.bfloat16 if part.device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory(prefix="april-gpu-") as made:
        folder = make_model(Path(made), scale.shape, dtype, 4 * max(scale.context, scale.longest), str(part.device))
        weights = load_folder_weights(folder)
        bench = Bench(part, scale, folder, weights)
        with part.attempt("logprobs of the engine against transformers"):
            bench.agreement()
        first, *others = scale.slots
        for what, measure, needed_s in (
            (f"decode steps of {first} slots", partial(bench.bandwidth, first), 6),
            ("generate of transformers", bench.generate, 20),
            ("generate on long-tailed lengths", bench.long_tail, 10),
            ("a bare loop", bench.bare_loop, 6),
            *((f"decode steps of {slots} slots", partial(bench.bandwidth, slots), 5) for slots in others),
            ("the cache by length groups", bench.grouped, 8),
        ):
            if part.enough_time(what, needed_s):
                with part.attempt(what):
                    measure()


class Bench:
    def __init__(self, part: Part, scale: Scale, folder: Path, weights: dict[str, torch.Tensor]):
        self.part, self.scale, self.folder, self.weights = part, scale, folder, weights
        self._model = None
        self._speeds: dict[str, float] = {}

    @property
    def model(self):
        if self._model is None:
            dtype = torch.bfloat16 if self.part.device.type == "cuda" else torch.float32
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation="sdpa")
            self._model = model.to(self.part.device).eval()
        return self._model

    def engine(self, slots: int, flat: bool = True, context: int | None = None) -> TorchEngine:
        context = context or self.scale.context + 2 * self.scale.steps + 104
        engine = TorchEngine(
            self.folder, slots, context, str(self.part.device), chunk_tokens=4096, report_s=1e9,
            prefill_tokens=16_384, flat=flat,
        )  # fmt: skip
        engine.load_weights(V0, self.weights)
        return engine

    def prompts(self, count: int, length: int, seed: int = 0) -> list[np.ndarray]:
        vocabulary = QWEN3_SHAPES[self.scale.shape]["vocab_size"]
        rng = np.random.default_rng(seed)
        return [rng.integers(2, vocabulary, length).astype(np.int32) for _ in range(count)]

    def sync(self) -> None:
        if self.part.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], object]) -> float:
        self.sync()
        started = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - started

    # --- what is measured ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def agreement(self) -> None:
        """Log-probabilities that the engine recorded, against a forward pass of transformers over the same tokens."""
        engine = self.engine(8)
        prompts = self.prompts(8, 50)
        requests = [Request(i, prompt, 70 if i % 2 else 90, seed=i) for i, prompt in enumerate(prompts)]
        chunks = drain(engine, requests)
        apart = []
        for request in requests:
            tokens = np.concatenate([request.tokens, *(chunk.tokens for chunk in chunks[request.id])])
            ours = np.concatenate([chunk.logprobs for chunk in chunks[request.id]])
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self.part.device)[None]
            logits = self.model(ids).logits[0, len(request.tokens) - 1 : -1].float()
            theirs = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.tokens) :, None])[:, 0]
            apart.append(np.abs(ours - theirs.cpu().numpy()))
        engine.close()
        apart = np.concatenate(apart)
        self.part.row("gpu_engine_logprob_error", float(np.median(apart)), "nats")
        self.part.row("gpu_engine_logprob_error_max", float(apart.max()), "nats")

    def bandwidth(self, slots: int) -> None:
        """Decode steps of full slots, with contexts of the same length."""
        scale = self.scale
        engine = self.engine(slots)
        for i, prompt in enumerate(self.prompts(slots, scale.context)):
            engine.submit(Request(i, prompt, 2 * scale.steps + 40, seed=i))
        while engine.queued:
            engine.step()
        for _ in range(4):  # graphs of the full batch are captured, and its contexts move to larger extents
            engine.step()
        step_s = [self.timed(engine.step) for _ in range(scale.steps)]
        context = scale.context + 4 + scale.steps / 2
        shape = engine.shape
        token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        weight_bytes = sum(tensor.numel() for tensor in self.weights.values()) * shape.dtype.itemsize
        limit_s = (weight_bytes + slots * context * token_bytes) / self.copy_bytes_per_s()
        typical = statistics.median(step_s)
        self.part.row(f"gpu_decode_step_ms_{slots}", [1e3 * each for each in step_s], "ms")
        self.part.row(f"gpu_decode_tokens_per_s_{slots}", slots / typical, "tokens/s")
        name = "gpu_engine_bandwidth_share" + ("" if slots == max(scale.slots) else f"_{slots}")
        self.part.row(name, limit_s / typical, "fraction")
        if self.part.device.type == "cuda":
            self.split_step(engine, slots)
        engine.close()

    @torch.inference_mode()
    def split_step(self, engine: TorchEngine, slots: int) -> None:
        """Where a step's time goes: the graph alone, and sampling alone."""
        from april.workers.engines.embedded.sampling import sample, uniforms

        cache, batch = engine._cache, engine._batch or engine._new_batch()
        assert batch is not None and engine._decoder is not None
        graph_s = [self.timed(lambda: cache.decode(engine._decoder, batch)) for _ in range(8)]
        logits = cache.decode(engine._decoder, batch)
        uniform = torch.from_numpy(uniforms(batch.stream, batch.lengths)).to(engine.device)
        sample_s = [self.timed(lambda: sample(logits, uniform, batch.plan)) for _ in range(8)]
        self.part.row(f"gpu_decode_graph_ms_{slots}", [1e3 * each for each in graph_s[1:]], "ms")
        self.part.row(f"gpu_sample_ms_{slots}", [1e3 * each for each in sample_s[1:]], "ms")

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written by a copy on the device."""
        if "copy" not in self._speeds:
            size = 1 << (31 if self.part.device.type == "cuda" else 24)
            source = torch.ones(size, dtype=torch.uint8, device=self.part.device)
            target = torch.empty_like(source)
            times = [self.timed(lambda: target.copy_(source)) for _ in range(6)]
            self._speeds["copy"] = 2 * size / statistics.median(times[1:])
            self.part.row("gpu_copy_gb_per_s", self._speeds["copy"] / 1e9, "GB/s")
        return self._speeds["copy"]

    def engine_speed(self, lengths: np.ndarray, flat: bool = True) -> float:
        """Tokens/s of the engine on these lengths, with one run before it in which graphs are captured."""
        scale = self.scale
        engine = self.engine(scale.rows, flat, scale.prompt + int(lengths.max()) + 8)
        prompts = self.prompts(len(lengths), scale.prompt)
        requests = [
            Request(i, prompt, int(length), seed=i)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        drain(engine, [replace(request, max_new_tokens=min(request.max_new_tokens, 16)) for request in requests])
        seconds = self.timed(lambda: drain(engine, requests))
        engine.close()
        return int(lengths.sum()) / seconds

    @torch.inference_mode()
    def bare_loop(self) -> None:
        """The same model in the plainest loop: transformers' forward with a dynamic cache, one multinomial a step."""
        scale = self.scale
        steps = min(scale.response, 64)
        ids = torch.from_numpy(np.stack(self.prompts(scale.rows, scale.prompt)).astype(np.int64)).to(self.part.device)

        def loop() -> None:
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            for _ in range(steps):
                token = torch.multinomial(F.softmax(out.logits[:, -1].float(), -1), 1)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)

        self.timed(loop)
        speed = scale.rows * steps / self.timed(loop)
        ours = self._equal()
        self.part.row("gpu_bare_loop_tokens_per_s", speed, "tokens/s")
        self.part.row("gpu_engine_vs_bare", ours / speed, "ratio")

    def _equal(self) -> float:
        if "equal" not in self._speeds:
            scale = self.scale
            self._speeds["equal"] = self.engine_speed(np.full(scale.rows, scale.response))
            self.part.row("gpu_engine_tokens_per_s", self._speeds["equal"], "tokens/s")
        return self._speeds["equal"]

    def generate(self) -> None:
        """Equal lengths: the engine against `generate` with a static cache, which transformers compiles."""
        ours, scale = self._equal(), self.scale
        compiling_s = self.timed(lambda: self.run_generate(np.full(scale.rows, scale.response)))
        speed = scale.rows * scale.response / self.timed(lambda: self.run_generate(np.full(scale.rows, scale.response)))
        self.part.fact("seconds of the first generate, with compilation", round(compiling_s, 1))
        self.part.row("gpu_generate_tokens_per_s", speed, "tokens/s")
        self.part.row("gpu_engine_vs_generate", ours / speed, "ratio")

    def long_tail(self) -> None:
        """Long-tailed lengths: a batch of `generate` lasts as long as its longest response."""
        scale = self.scale
        rng = np.random.default_rng(0)
        drawn = np.exp(rng.normal(np.log(scale.median), 1.0, 2 * scale.rows)).round()
        lengths = np.clip(drawn, 1, scale.longest).astype(int)
        ours = self.engine_speed(lengths)
        self.part.row("gpu_engine_tokens_per_s_long_tailed", ours, "tokens/s")
        tokens, seconds = 0, 0.0
        for start in range(0, len(lengths), scale.rows):
            batch = lengths[start : start + scale.rows]
            tokens += int(batch.sum())
            seconds += self.timed(lambda batch=batch: self.run_generate(batch))
            if not self.part.enough_time("another batch of generate", seconds):
                break
        self.part.row("gpu_engine_vs_generate_long_tailed", ours / (tokens / seconds), "ratio")

    def grouped(self) -> None:
        """The flat cache with its graphs against the cache by length groups, on equal lengths."""
        theirs = self.engine_speed(np.full(self.scale.rows, self.scale.response), flat=False)
        self.part.row("gpu_flat_vs_grouped", self._equal() / theirs, "ratio")

    @torch.inference_mode()
    def run_generate(self, lengths: np.ndarray) -> None:
        prompts = np.stack(self.prompts(len(lengths), self.scale.prompt)).astype(np.int64)
        ids = torch.from_numpy(prompts).to(self.part.device)
        longest = int(lengths.max())
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=None, pad_token_id=0, cache_implementation="static", max_new_tokens=longest,
            stopping_criteria=StoppingCriteriaList([Never()]),
        )  # fmt: skip
        assert output.shape[1] == ids.shape[1] + longest


class Never(StoppingCriteria):
    """No row ends before the batch does."""

    def __call__(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def drain(engine: TorchEngine, requests: list[Request]) -> dict[int, list[Chunk]]:
    """Run the requests to their end; their chunks, by request."""
    for request in requests:
        engine.submit(request)
    chunks: dict[int, list[Chunk]] = {request.id: [] for request in requests}
    while engine.live:
        for chunk in engine.step():
            chunks[chunk.id].append(chunk)
    assert all(sum(len(c.tokens) for c in chunks[request.id]) == request.max_new_tokens for request in requests)
    return chunks


if __name__ == "__main__":
    main()
