"""Peak memory of a vocabulary head, and of a rank that loads its part of a model, each in a process of its own."""

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.learner.head import score_tokens
from april.learner.model import empty_policy, load_sharded

TOKENS, VOCABULARY, HIDDEN = 2048, 151_936, 256
RANKS = 4


def in_processes(target: Callable, arguments: list[tuple]) -> list[int]:
    """Run `target(*arguments, writer)` for each arguments in a new process, side by side; returns what they write."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    processes = [context.Process(target=target, args=(*each, writer)) for each in arguments]
    for process in processes:
        process.start()
    writer.close()
    try:
        return [reader.recv() for _ in processes]
    finally:
        for process in processes:
            process.join()


def peak_above(work: Callable) -> int:
    """Largest resident memory during the work, above what there was before (bytes)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    result = work()
    peak = status_bytes("VmHWM") - before
    del result
    return peak


def status_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


# --- the vocabulary head ----------------------------------------------------------------------------------------------


def chunked_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The learner's own (log-probabilities, entropies)."""
    return score_tokens(hidden, weight, targets, 1.0)


def full_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of all logits at once, in fp32."""
    distribution = torch.log_softmax((hidden @ weight.T).float(), -1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None])[:, 0], entropies


def head_peak_bytes(score: Callable, quick: bool) -> int:
    """Forward and backward: resident memory above the inputs, with the gradients of hidden states and weight."""
    return in_processes(measure_head, [(score, TOKENS // 8 if quick else TOKENS)])[0]


def measure_head(score: Callable, tokens: int, writer) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    small = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.zeros(4, dtype=int)
    sum(score(*small)).sum().backward()  # imports and thread pools are not what is measured
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.05).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,))

    def work() -> tuple[Tensor, Tensor]:
        logprobs, entropies = score(hidden, weight, targets)
        (logprobs.sum() + entropies.sum()).backward()
        return logprobs, entropies

    writer.send(peak_above(work))


# --- loading ----------------------------------------------------------------------------------------------------------


def loading_peaks_over_bound(folder: Path) -> list[float]:
    """Peak memory of loading in each rank, over model / ranks + the largest tensor, in fp32."""
    sizes = [4 * tensor.numel() for tensor in load_file(folder / "model.safetensors").values()]
    store, small = folder.with_name("store"), make_small(folder.with_name("small"))
    peaks = in_processes(measure_loading, [(folder, small, rank, store) for rank in range(RANKS)])
    return [peak / (sum(sizes) / RANKS + max(sizes)) for peak in peaks]


def measure_loading(folder: Path, small: Path, rank: int, store: Path, writer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)

    def loaded(path: Path):
        return load_sharded(empty_policy(path, 1.0), path, torch.device("cpu"))

    loaded(small)  # imports are not what is measured
    writer.send(peak_above(lambda: loaded(folder)))
    dist.barrier()
    dist.destroy_process_group()


def make_small(folder: Path) -> Path:
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    return folder
