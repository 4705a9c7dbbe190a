"""The torch engine on a GPU: its decode step against the memory's bandwidth, a bare loop, and transformers' `generate`
with a compiled static cache. Random weights of Qwen3-0.6B's shape in bf16; every response has its forced length.

`generate` compiles in a process of its own while the rest is measured, and is timed last, when nothing else runs.

The limit of a decode step reads all weights and the keys and values of every context once, at the speed of a copy on
the same device.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import orjson
import torch
import torch.nn.functional as F
from part import QWEN3_SHAPES, Part, make_model
from transformers import AutoModelForCausalLM

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
    """Tokens of a prompt beside `generate`."""
    median: int
    longest: int
    """Median and cut of the long-tailed lengths (lognormal with σ = 1); the cut is also what equal lengths are."""
    batches: int
    """Batches of long-tailed lengths."""


FULL = Scale("0.6B", (32, 128, 256), context=1024, steps=64, rows=128, prompt=128, median=64, longest=512, batches=3)
TINY = Scale("tiny", (2, 4), context=100, steps=4, rows=4, prompt=12, median=8, longest=24, batches=2)
BARE_STEPS = 64
COMPILING_S = 60.0
"""Longest time that is waited for `generate` to be compiled, once all else is measured (seconds)."""
KEPT_S = 16.0
"""Time that is kept for `generate` by what is less telling (seconds)."""


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n\n")[0])
    scale = TINY if part.tiny else FULL
    if part.device.type == "cpu":
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if part.device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory(prefix="april-gpu-") as made:
        folder = make_model(Path(made), scale.shape, dtype, 4 * max(scale.context, scale.longest), str(part.device))
        with closing(Generate(part, scale, folder)) as theirs:
            weights = {name: tensor.to(part.device) for name, tensor in load_folder_weights(folder).items()}
            bench = Bench(part, scale, folder, weights, theirs)
            *others, most = scale.slots
            for what, measure, needed_s in (
                ("logprobs of the engine against transformers", bench.agreement, 5),
                *((f"decode steps of {slots} slots", partial(bench.bandwidth, slots), 5) for slots in others),
                ("the engine's tokens/s", bench.engine_speeds, 15),
                ("a bare loop", bench.bare_loop, 6),
                (f"decode steps of {most} slots", partial(bench.bandwidth, most), KEPT_S + 6),
                ("generate of transformers", bench.generate, KEPT_S),
                ("the cache by length groups", bench.grouped, 10),
            ):
                if part.enough_time(what, needed_s):
                    with part.attempt(what):
                        measure()


class Generate:
    """`generate_side.py` in a process of its own, which has begun to compile."""

    def __init__(self, part: Part, scale: Scale, folder: Path):
        self._part = part
        sizes = {"rows": scale.rows, "prompt": scale.prompt, "longest": scale.longest}
        sizes["vocabulary"] = QWEN3_SHAPES[scale.shape]["vocab_size"]
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        script = Path(__file__).with_name("generate_side.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder), "--device", str(part.device), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._waits: float | None = None

    def await_ready(self) -> None:
        """Wait until it is compiled. Raises TimeoutError."""
        if self._waits is None:
            longest_s = COMPILING_S if self._part.tiny else min(COMPILING_S, self._part.left_s - KEPT_S / 2)
            self._waits = self._read(longest_s)["ready"]
            self._part.fact("generate: seconds to load and to compile, beside the rest", round(self._waits, 1))

    def seconds_of(self, lengths: np.ndarray) -> float:
        """Time of a batch with these lengths."""
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(lengths.tolist()) + b"\n")
        self._process.stdin.flush()
        return self._read(max(1.0, self._part.left_s))["seconds"]

    def _read(self, longest_s: float) -> dict[str, float]:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], max(0.0, longest_s))[0]:
            raise TimeoutError(f"generate has said nothing for {longest_s:.0f} s")
        if not (line := output.readline()):
            raise RuntimeError(f"generate has ended with status {self._process.wait()}; its error is in the log")
        return orjson.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Bench:
    def __init__(self, part: Part, scale: Scale, folder: Path, weights: dict[str, torch.Tensor], theirs: Generate):
        self.part, self.scale, self.folder, self.weights, self.theirs = part, scale, folder, weights, theirs
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
            prefill_tokens=16_384, flat=None if flat else False,
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

    def now(self) -> float:
        """The time when all work on the device is done (seconds)."""
        self.sync()
        return time.perf_counter()

    def timed(self, work: Callable[[], object]) -> float:
        started = self.now()
        work()
        return self.now() - started

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
        times = [self.now()]
        for _ in range(1 + scale.steps):  # steps run ahead, so nothing else waits for the device between them
            engine.step()
            times.append(time.perf_counter())
        step_s = np.diff(times)[1:].tolist()  # what the first returns was done before
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

    def requests(self, lengths: np.ndarray) -> list[Request]:
        prompts = self.prompts(len(lengths), self.scale.prompt)
        return [
            Request(i, prompt, int(length), seed=i)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]

    @property
    def equal_lengths(self) -> np.ndarray:
        return np.full(self.scale.rows, self.scale.longest)

    @property
    def long_tailed_lengths(self) -> np.ndarray:
        scale = self.scale
        drawn = np.exp(np.random.default_rng(0).normal(np.log(scale.median), 1.0, scale.batches * scale.rows))
        return np.clip(drawn.round(), 1, scale.longest).astype(int)

    def engine_speeds(self) -> None:
        """Tokens/s of the engine on equal and on long-tailed lengths. Before, it runs once with all its rows and once
        with every number of rows: its cache grows, and graphs are captured."""
        scale = self.scale
        engine = self.engine(scale.rows, context=scale.prompt + scale.longest + 8)
        rows, long_tailed = np.arange(scale.rows), self.long_tailed_lengths
        warm_s = self.timed(lambda: drain(engine, self.requests(self.equal_lengths)))
        warm_s += self.timed(lambda: drain(engine, self.requests(1 + rows % scale.longest)))
        self.part.fact("the engine's first runs, with captures (seconds)", round(warm_s, 2))
        for name, lengths in (("equal", self.equal_lengths), ("long_tailed", long_tailed)):
            requests = self.requests(lengths)
            self._speeds[name] = int(lengths.sum()) / self.timed(lambda requests=requests: drain(engine, requests))
            ending = "_long_tailed" * (name == "long_tailed")
            self.part.row(f"gpu_engine_tokens_per_s{ending}", self._speeds[name], "tokens/s")
        engine.close()

    @torch.inference_mode()
    def bare_loop(self) -> None:
        """The same model in the plainest loop: transformers' forward with a dynamic cache, one multinomial a step."""
        scale, steps = self.scale, min(self.scale.longest, BARE_STEPS)
        ids = torch.from_numpy(np.stack(self.prompts(scale.rows, scale.prompt)).astype(np.int64)).to(self.part.device)

        def loop() -> None:
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            for _ in range(steps):
                token = torch.multinomial(F.softmax(out.logits[:, -1].float(), -1), 1)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)

        self.timed(loop)
        speed = scale.rows * steps / self.timed(loop)
        self.part.row("gpu_bare_loop_tokens_per_s", speed, "tokens/s")
        self.part.row("gpu_engine_vs_bare", self._speeds["equal"] / speed, "ratio")

    def generate(self) -> None:
        """The engine against `generate`: long-tailed lengths in the order in which they come, where a batch lasts as
        long as its longest response, and equal ones after the first batch."""
        scale, ours, equal = self.scale, self._speeds, self.equal_lengths
        self.theirs.await_ready()
        tokens, taken_s, longest_s = 0, 0.0, 0.0
        for number, batch in enumerate(self.long_tailed_lengths.reshape(-1, scale.rows)):
            if number and not self.part.enough_time("another batch of generate", 1.2 * longest_s):
                break
            seconds = self.theirs.seconds_of(batch)
            tokens, taken_s, longest_s = tokens + int(batch.sum()), taken_s + seconds, max(longest_s, seconds)
            self.part.fact("generate: long-tailed batches, tokens/s", [number + 1, round(tokens / taken_s)])
            if not number and self.part.enough_time("generate on equal lengths", 1.3 * longest_s):
                seconds = self.theirs.seconds_of(equal)
                self.part.row("gpu_generate_tokens_per_s", int(equal.sum()) / seconds, "tokens/s")
                self.part.row("gpu_engine_vs_generate", ours["equal"] * seconds / int(equal.sum()), "ratio")
        self.part.row("gpu_generate_tokens_per_s_long_tailed", tokens / taken_s, "tokens/s")
        self.part.row("gpu_engine_vs_generate_long_tailed", ours["long_tailed"] * taken_s / tokens, "ratio")

    def grouped(self) -> None:
        """The flat cache with its graphs against the cache by length groups, on equal lengths."""
        requests = self.requests(self.equal_lengths // 4)
        seconds = []
        for flat in (True, False):
            engine = self.engine(self.scale.rows, flat, self.scale.prompt + self.scale.longest + 8)
            drain(engine, [replace(request, max_new_tokens=8) for request in requests])
            seconds.append(self.timed(lambda engine=engine: drain(engine, requests)))
            engine.close()
        self.part.row("gpu_flat_vs_grouped", seconds[1] / seconds[0], "ratio")


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
