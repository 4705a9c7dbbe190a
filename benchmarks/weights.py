"""Publication of weights: what it takes of the ranks' memory, and how evenly they send.

Ranks of a learner hold a sharded model in bfloat16, gather and publish it over gloo to 1 and more workers on this
machine, each version in parts of which every rank gathers and sends one. `publish_extra_bytes` is the most that any
rank's memory grows by meanwhile, `publish_extra_limit` the rank's shard and three buckets. The last version of the same
call is gathered on rank 0 and sent from there: `undivided_extra_bytes`.

`join_without_learner_ratio` is the time in which a worker has the weights of a snapshot of as many bytes, in a file for
each rank, over that of reading the same files and computing their SHA-256, as many at a time. Before both the files
leave the page cache.

`delta_bytes_share_LR` is the size of a delta over that of a whole snapshot in bfloat16, for the steps after ten of
warm-up with AdamW at a learning rate. The model has the shape of Qwen3-0.6B with fewer layers (`--layers`) and random
weights; every step is a policy gradient with random advantages of random tokens. `delta_changed_share_LR` is the share
of values that have changed.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
from common import Row, environment_of, parser, process, report, wait_for

BUCKET_BYTES = 16 << 20
TENSOR_BYTES = 8 << 20
LEARNING_RATES = {1e-6: 0.03, 5e-6: 0.10}
"""Learning rate -> largest `delta_bytes_share`."""
WARM_UP_STEPS = 10
DELTAS = 2


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4, help="of the learner [default 4]")
    arguments.add_argument("--mib", type=int, default=1024, help="of weights; takes eight times as much [default 1024]")
    arguments.add_argument(
        "--layers", type=int, default=2, help="of the model of the deltas; Qwen3-0.6B has 28 [default 2]"
    )
    arguments.add_argument("--only", choices=["parts", "joins", "deltas"], nargs="*", help="measure these alone")
    given = arguments.parse_args()
    chosen, model_bytes = given.only or ["parts", "joins", "deltas"], (64 if given.quick else given.mib) << 20
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="april-weights-") as made:
        if "parts" in chosen:
            rows += rows_of_parts(Path(made), given.ranks, model_bytes)
        if "joins" in chosen:
            joins, reads = measure_joins(Path(made) / "snapshots", given.ranks, model_bytes, 3 if given.quick else 5)
            ratios = [join / read for join, read in zip(joins, reads, strict=True)]
            rows += [
                Row("join_without_learner_s", joins, "s"),
                Row("read_and_checked_s", reads, "s"),
                Row("join_without_learner_ratio", ratios, "of reading"),
            ]
        for rate, limit in LEARNING_RATES.items() if "deltas" in chosen else ():
            rows += rows_of_deltas(Path(made) / f"deltas-{rate}", 1 if given.quick else given.layers, rate, limit)
    report(rows, given.json, model_bytes=model_bytes, ranks=given.ranks, layers=given.layers)


def rows_of_parts(folder: Path, ranks: int, model_bytes: int) -> list[Row]:
    result = measure(folder, ranks, model_bytes // TENSOR_BYTES, [1, 2])
    found = result["ranks"]
    extra, sent = max(each["extra_bytes"] for each in found), [each["sent_bytes"] for each in found]
    limit = found[0]["shard_bytes"] + 3 * BUCKET_BYTES
    return [
        Row("publish_extra_bytes", [extra], "bytes"),
        Row("publish_extra_limit", [limit], "bytes"),
        Row("publish_extra_ratio", [extra / limit], "of the limit"),
        Row("undivided_extra_bytes", [result["undivided_extra_bytes"]], "bytes"),
        Row("egress_share_of_busiest_rank", [max(sent) / sum(sent)], "of all bytes sent"),
        Row("egress_share_limit", [1.3 / ranks], "of all bytes sent"),
        *(Row(name, [value], "s") for name, value in sorted(result["seconds"].items())),
    ]


def rows_of_deltas(folder: Path, layers: int, rate: float, limit: float) -> list[Row]:
    """Train, write a whole snapshot after the warm-up and then deltas, and apply these as a worker does."""
    import torch

    from april.util.objects import ObjectStore
    from april.weights.folders import SnapshotFolders
    from april.weights.snapshot import ReusedBuffers, pack, unpack
    from april.wire.message import Version

    folders, steps = SnapshotFolders(ObjectStore(str(folder))), trained_weights(layers, rate)
    base, held, chain = None, None, []
    shares, changed, written_s, applied_s = [], [], [], []
    for step, weights in enumerate(steps):
        part = pack(Version(0, step), weights)
        began = time.perf_counter()
        files = folders.write_part(part, 0, base)
        written_s.append(time.perf_counter() - began)
        chain.append(folders.complete(part.version, files, None, {}, chain))
        began = time.perf_counter()
        held = folders.read(chain[-1], ReusedBuffers(), 600.0, held)
        applied_s.append(time.perf_counter() - began)
        new = unpack(part.heads, part.data)
        if any(not torch.equal(held.tensors[name], each) for name, each in new.items()):
            sys.exit("a delta gives other weights than the learner's")
        if base:
            old = unpack(base.heads, base.data)
            shares.append(sum(file.size for file in files) / part.data.numel())
            moved = sum(int((new[name] != each).sum()) for name, each in old.items())
            changed.append(moved / sum(each.numel() for each in new.values()))
        base = part
    return [
        Row(f"delta_bytes_share_{rate:g}", shares, "of a whole snapshot"),
        Row(f"delta_bytes_limit_{rate:g}", [limit], "of a whole snapshot"),
        Row(f"delta_changed_share_{rate:g}", changed, "of all values"),
        Row(f"delta_written_s_{rate:g}", written_s[1:], "s"),
        Row(f"delta_read_s_{rate:g}", applied_s[1:], "s"),
    ]


def trained_weights(layers: int, rate: float) -> Iterator[dict]:
    """The weights in bfloat16 after the warm-up, and after each of the next steps."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(
        **shape, head_dim=128, vocab_size=151936, num_hidden_layers=layers, tie_word_embeddings=True, dtype="float32"
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(1, WARM_UP_STEPS + DELTAS + 1):
        tokens, advantages = torch.randint(config.vocab_size, (8, 16)), torch.randn(8, 1)
        logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-advantages * logprobs).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # new gradients cost page faults
        if step >= WARM_UP_STEPS:
            yield {name: each.detach().bfloat16() for name, each in model.named_parameters()}


def measure(folder: Path, ranks: int, tensors: int, workers: list[int]) -> dict:
    """What the ranks have found, as `weights_rank.py` writes it."""
    program = [sys.executable, Path(__file__).with_name("weights_rank.py")]
    counts = ",".join(map(str, workers))
    with contextlib.ExitStack() as running:
        started: list[subprocess.Popen] = []
        for rank in range(ranks):
            command = [*program, "rank", rank, ranks, folder, tensors, counts]
            started.append(running.enter_context(process(command, folder / f"rank-{rank}.log", env=environment_of(1))))
        there = 0
        for count in workers:
            wait_for((folder / f"wanted_{count}").exists, f"a learner that waits for {count} workers", started[0], 900)
            for name in range(there, count):
                command = [*program, "worker", f"w{name}", folder]
                running.enter_context(process(command, folder / f"worker-{name}.log", env=environment_of(1)))
            there = count
        deadline = time.monotonic() + 1500
        while not (folder / "result.json").exists() and time.monotonic() < deadline:
            if any(each.poll() for each in started):
                sys.exit("".join(path.read_text()[-2000:] for path in folder.glob("*.log")))
            time.sleep(0.2)
        return orjson.loads((folder / "result.json").read_bytes())


def measure_joins(folder: Path, ranks: int, model_bytes: int, turns: int) -> tuple[list[float], list[float]]:
    """Seconds in which a worker has the weights of a snapshot, and in which the same files are read and checked."""
    import torch

    from april.util.objects import ObjectStore
    from april.weights.folders import READERS, TENSORS, SnapshotFolders
    from april.weights.puller import SnapshotPuller
    from april.weights.snapshot import pack
    from april.wire.message import Version

    folders, version, values = SnapshotFolders(ObjectStore(str(folder))), Version(0, 0), TENSOR_BYTES // 2
    files = []
    for rank in range(ranks):
        count = model_bytes // TENSOR_BYTES // ranks
        part = {f"{rank}.{each}": torch.randn(values, dtype=torch.bfloat16) for each in range(count)}
        files += folders.write_part(pack(version, part), rank)
    written = folders.complete(version, files, None, {})
    paths = sorted(folder.rglob(f"*{TENSORS}"))
    joins, reads = [], []
    for _ in range(turns):
        forget(paths)
        began = time.perf_counter()
        puller = SnapshotPuller(folders, 600.0)
        puller.offer([written])
        while not puller.has_staged:
            time.sleep(0.001)
        joins.append(time.perf_counter() - began)
        puller.close()
        forget(paths)
        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(read_and_check, paths))
        reads.append(time.perf_counter() - began)
    return joins, reads


def forget(paths: list[Path]) -> None:
    """Have the kernel drop files from its page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_and_check(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
