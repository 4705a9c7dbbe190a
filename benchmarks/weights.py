"""Publication of weights: what it takes of the ranks' memory, and how evenly they send.

Ranks of a learner hold a sharded model in bfloat16, gather and publish it over gloo to 1 and more workers on this
machine, each version in parts of which every rank gathers and sends one. `publish_extra_bytes` is the most that any
rank's memory grows by meanwhile, `publish_extra_limit` the rank's shard and three buckets. The last version of the same
call is gathered on rank 0 and sent from there: `undivided_extra_bytes`.

`join_without_learner_ratio` is the time in which a worker has the weights of a snapshot of as many bytes, in a file for
each rank, over that of reading the same files and computing their SHA-256, as many at a time. Before both the files
leave the page cache.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
from common import Row, parser, process, python_path, report, wait_for

BUCKET_BYTES = 16 << 20
TENSOR_BYTES = 8 << 20


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4, help="of the learner [default 4]")
    arguments.add_argument("--mib", type=int, default=1024, help="of weights; takes eight times as much [default 1024]")
    given = arguments.parse_args()
    model_bytes, workers = (64 if given.quick else given.mib) << 20, [1, 2]
    with tempfile.TemporaryDirectory(prefix="april-weights-") as made:
        result = measure(Path(made), given.ranks, model_bytes // TENSOR_BYTES, workers)
        joins, reads = measure_joins(Path(made) / "snapshots", given.ranks, model_bytes, 3 if given.quick else 5)
    ranks = result["ranks"]
    extra, sent = max(each["extra_bytes"] for each in ranks), [each["sent_bytes"] for each in ranks]
    limit = ranks[0]["shard_bytes"] + 3 * BUCKET_BYTES
    rows = [
        Row("publish_extra_bytes", [extra], "bytes"),
        Row("publish_extra_limit", [limit], "bytes"),
        Row("publish_extra_ratio", [extra / limit], "of the limit"),
        Row("undivided_extra_bytes", [result["undivided_extra_bytes"]], "bytes"),
        Row("egress_share_of_busiest_rank", [max(sent) / sum(sent)], "of all bytes sent"),
        Row("egress_share_limit", [1.3 / given.ranks], "of all bytes sent"),
        Row("join_without_learner_s", joins, "s"),
        Row("read_and_checked_s", reads, "s"),
        Row("join_without_learner_ratio", [join / read for join, read in zip(joins, reads, strict=True)], "of reading"),
        *(Row(name, [value], "s") for name, value in sorted(result["seconds"].items())),
    ]
    report(rows, given.json, model_bytes=model_bytes, ranks=given.ranks)


def measure(folder: Path, ranks: int, tensors: int, workers: list[int]) -> dict:
    """What the ranks have found, as `weights_rank.py` writes it."""
    program = [sys.executable, Path(__file__).with_name("weights_rank.py")]
    options = {"env": os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}}
    counts = ",".join(map(str, workers))
    with contextlib.ExitStack() as running:
        started: list[subprocess.Popen] = []
        for rank in range(ranks):
            command = [*program, "rank", rank, ranks, folder, tensors, counts]
            started.append(running.enter_context(process(command, folder / f"rank-{rank}.log", **options)))
        there = 0
        for count in workers:
            wait_for((folder / f"wanted_{count}").exists, f"a learner that waits for {count} workers", started[0], 900)
            for name in range(there, count):
                command = [*program, "worker", f"w{name}", folder]
                running.enter_context(process(command, folder / f"worker-{name}.log", **options))
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
