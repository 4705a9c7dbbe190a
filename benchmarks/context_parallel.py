"""What ranks that share sequences compute, hold and cost, each in a process of its own on one thread."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import Row, in_turns
from peak_memory import in_processes, status_bytes
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.config import Config
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.packing import pack
from april.learner.trainer import Trainer
from april.wire.message import Version

MEASURES = ("context_parallel_gap", "context_parallel_memory_4", "context_parallel_step_2", "longest_sequence_4_ranks")
LAYOUTS = ((2, 2), (4, 4), (4, 2))
"""(ranks, ranks that share a row), compared with one rank."""
CONTROL = (2, 1)
"""Ranks that share no row: what another order of sums alone does."""
SMALL = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 16}
WIDE = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
KEPT_TOKENS = 2048
SEQUENCE, LONG = 8192, 131_072
MEMORY_BYTES, STEP_S = 8 << 30, 600.0
"""Memory of a rank, and time of a step, up to which a sequence counts as trained."""
CPU = torch.device("cpu")


def rows(folder: Path, wanted: set[str], quick: bool) -> list[Row]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is given back, in the processes that measure
    made = {
        "context_parallel_gap": gap_row,
        "context_parallel_memory_4": memory_row,
        "context_parallel_step_2": step_row,
        "longest_sequence_4_ranks": longest_row,
    }
    return [row(folder / name, quick) for name, row in made.items() if name in wanted]


def make_model(folder: Path, shape: dict[str, int], heads: int) -> Path:
    torch.manual_seed(0)
    shape = {**shape, "num_attention_heads": heads, "num_key_value_heads": 2, "max_position_embeddings": LONG}
    Qwen3ForCausalLM(Qwen3Config(**shape, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    return folder


def on_ranks(target, folder: Path, ranks: int, *arguments) -> list:
    """What `target(folder, *arguments)` returns on each rank, in any order."""
    store = folder.with_name(f"{folder.name} {time.monotonic_ns()}")
    return in_processes(at_rank, [(target, folder, store, rank, ranks, arguments) for rank in range(ranks)])


def at_rank(target, folder: Path, store: Path, rank: int, ranks: int, arguments: tuple, writer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    writer.send(target(folder, *arguments))
    dist.barrier()
    dist.destroy_process_group()


def trainer_of(folder: Path, size: int, **learner: Any) -> Trainer:
    """A trainer whose rows `size` ranks share."""
    keys = {"ranks": dist.get_world_size(), "context_parallel": size, "device": "cpu", **learner}
    run = {"model": {"path": folder}, "data": {"path": "none.jsonl"}, "run": {"dir": folder.parent}}
    return Trainer(Config.model_validate({**run, "learner": keys}), CPU)


def sample_of(tokens: int, vocabulary: int, rng: np.random.Generator, response: int | None = None) -> TrainSample:
    ids, response = rng.integers(0, vocabulary, tokens + 1).astype(np.int32), response or tokens
    logprobs = np.full(response, -np.log(vocabulary), np.float32)
    return TrainSample(ids, tokens + 1 - response, logprobs, float(rng.normal()), ((0, response, Version(0, 0)),))


# --- the same weights -------------------------------------------------------------------------------------------------


def gap_row(folder: Path, quick: bool) -> Row:
    """Largest difference of a weight after a step of a large learning rate from that of one rank."""
    make_model(folder, SMALL, heads=8)
    (alone,), gaps = on_ranks(trained, folder, 1, 1), []
    for ranks, size in (CONTROL, *LAYOUTS):
        (shared,) = filter(None, on_ranks(trained, folder, ranks, size))
        gaps.append(max(float(np.abs(shared[name] - value).max()) for name, value in alone.items()))
        print(f"  {ranks} ranks, {size} share a row: {gaps[-1]:.1e}", file=sys.stderr)
    return Row("context_parallel_gap", gaps[1:], "of a weight", max)


def trained(folder: Path, size: int) -> dict[str, np.ndarray]:
    trainer, rng = trainer_of(folder, size, lr=1e-3, microbatch_tokens=512), np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(128), 1.0, (4, 4)), 1, 2000).astype(int)
    groups = [[sample_of(int(n), SMALL["vocab_size"], rng) for n in group] for group in lengths]
    trainer.step(TrainingBatch(0, groups))
    return {name: tensor.numpy() for name, tensor in trainer.weights().items()}


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_row(folder: Path, quick: bool) -> Row:
    """What a rank keeps of further tokens of a sequence between forward and backward pass, over that of one rank."""
    make_model(folder, WIDE, heads=8)
    tokens, shares = KEPT_TOKENS // 4 if quick else KEPT_TOKENS, []
    for recompute in (False, True):
        kept = {size: max(on_ranks(kept_bytes, folder, size, size, tokens, recompute)) for size in (1, 2, 4)}
        print(f"  recomputed: {recompute}; MiB a rank: { {n: k >> 20 for n, k in kept.items()} }", file=sys.stderr)
        shares.append(kept[4] / kept[1])
    return Row("context_parallel_memory_4", shares, "of one rank's", max)


def kept_bytes(folder: Path, size: int, tokens: int, recompute: bool) -> int:
    policy, rng = trainer_of(folder, size, activation_checkpointing=recompute).policy, np.random.default_rng(0)

    def resident(length: int) -> int:
        scores = policy(pack([sample_of(length, WIDE["vocab_size"], rng, response=8)], CPU))
        held = status_bytes("VmRSS")
        del scores
        return held

    resident(tokens)
    few = resident(tokens // 4)
    return resident(tokens) - few


# --- speed ------------------------------------------------------------------------------------------------------------


def step_row(folder: Path, quick: bool) -> Row:
    make_model(folder, WIDE | {"num_hidden_layers": 1}, heads=8)
    found = on_ranks(speeds, folder, 2, SEQUENCE // 4 if quick else SEQUENCE, 1 if quick else 3)
    return Row("context_parallel_step_2", found[0], "ratio")


def speeds(folder: Path, tokens: int, rounds: int) -> list[float]:
    """Tokens a second of two ranks that share two sequences, over two that have one each."""
    rng = np.random.default_rng(0)
    both = [sample_of(tokens, WIDE["vocab_size"], rng) for _ in range(2)]
    rows = {2: pack(both, CPU), 1: pack([both[dist.get_rank()]], CPU)}
    backends = {size: trainer_of(folder, size).backend for size in rows}

    def taken(size: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        backends[size].backward([rows[size]], lambda index, logprobs, entropies: logprobs.mean())
        dist.barrier()
        return time.perf_counter() - began

    ratios = []
    for turn in range(rounds + 1):
        seconds = {size: taken(size) for size in in_turns(turn, 1, 2)}
        print(f"  seconds of a pass by ranks that share a row: {seconds}", file=sys.stderr)
        ratios.append(seconds[1] / seconds[2])
    return ratios[1:]


# --- length -----------------------------------------------------------------------------------------------------------


def longest_row(folder: Path, quick: bool) -> Row:
    """Tokens of a sequence that four ranks have trained, 0 if that took too long or too much memory."""
    make_model(folder, TINY, heads=4)
    tokens = LONG // 16 if quick else LONG
    found = on_ranks(trained_alone, folder, 4, tokens)
    seconds, peak = map(max, zip(*found, strict=True))
    print(f"  {tokens:,} tokens: {seconds:.0f} s, {peak >> 20:,} MiB in the largest rank", file=sys.stderr)
    fits = seconds <= STEP_S and peak <= MEMORY_BYTES
    return Row("longest_sequence_4_ranks", [tokens if fits else 0], "tokens")


def trained_alone(folder: Path, tokens: int) -> tuple[float, int]:
    """Seconds of a step on one sequence beside one of a token, and the peak of this rank's memory, bytes."""
    trainer, rng = trainer_of(folder, 4, microbatch_tokens=tokens // 4 + 1), np.random.default_rng(0)
    batch = TrainingBatch(0, [[sample_of(length, TINY["vocab_size"], rng) for length in (tokens, 1)]])
    began = time.perf_counter()
    metrics = trainer.step(batch)
    assert not metrics["update_skipped"] and metrics["trained_tokens"] == tokens + 1
    return time.perf_counter() - began, status_bytes("VmHWM")
