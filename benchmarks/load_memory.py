"""Peak memory of a rank that loads its part of a model, each rank a process of its own."""

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from head_memory import status_bytes
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.learner.model import load_sharded, empty_policy

RANKS = 4


def peaks_over_bound(folder: Path) -> list[float]:
    """Of each rank: resident memory above what it had before, over model / ranks + its largest tensor, in fp32."""
    sizes = [4 * tensor.numel() for tensor in load_file(folder / "model.safetensors").values()]
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    store, small = folder.with_name("store"), make_small(folder.with_name("small"))
    ranks = [context.Process(target=measure, args=(folder, small, rank, store, writer)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    writer.close()
    try:
        return [reader.recv() / (sum(sizes) / RANKS + max(sizes)) for _ in ranks]
    finally:
        for process in ranks:
            process.join()


def measure(folder: Path, small: Path, rank: int, store: Path, writer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    load_sharded(empty_policy(small, 1.0), small, torch.device("cpu"))  # imports are not what is measured
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    policy = load_sharded(empty_policy(folder, 1.0), folder, torch.device("cpu"))
    writer.send(status_bytes("VmHWM") - before)
    assert sum(parameter.to_local().numel() for parameter in policy.parameters()) > 0
    dist.barrier()
    dist.destroy_process_group()


def make_small(folder: Path) -> Path:
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    return folder
