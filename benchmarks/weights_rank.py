"""One rank of the learner of `weights.py`, or one of its workers, in a process of its own."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from april.config import LearnerSection, WeightsSection
from april.learner.held_tensors import HeldTensor
from april.learner.model import gather_tensors
from april.learner.process_group import all_gather_values
from april.learner.publication import DividedSending
from april.learner.weight_parts import WeightTensor
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.weights.transports import GroupLink
from april.wire.message import Version

WIDTH = 1024
"""Columns of each tensor."""
ROWS = 4096
"""Rows of each tensor: 8 MiB in bfloat16."""
SECTION = WeightsSection(publish_deadline_s=600.0, transfer_deadline_s=600.0, join_deadline_s=60.0)


def memory_bytes(name: str) -> int:
    """A figure of this process's memory: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class PeakMemory:
    """The most memory that a block takes beyond what there was before (bytes)."""

    def __enter__(self) -> "PeakMemory":
        Path("/proc/self/clear_refs").write_text("5")
        self.before = memory_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra_bytes = memory_bytes("VmHWM") - self.before


def count_sent(sent: list[int]) -> None:
    """Have every link note the bytes of each transfer."""
    send = GroupLink.send

    def send_and_note(link: GroupLink, buckets, deadline: float) -> None:
        def noted():
            for bucket in buckets:
                sent.append(bucket.numel())
                yield bucket

        send(link, noted(), deadline)

    GroupLink.send = send_and_note


def rank(own: int, ranks: int, folder: Path, tensors: int, workers: list[int]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "ranks"), ranks)
    dist.init_process_group("gloo", store=store, rank=own, world_size=ranks, timeout=timedelta(seconds=900))
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = {}
    for i in range(tensors):
        rows = torch.full((ROWS // ranks, WIDTH), i / 64, dtype=torch.bfloat16)
        sharded[f"layers.{i}.weight"] = DTensor.from_local(rows, mesh, [Shard(0)])
    parts = [WeightTensor.whole(name, HeldTensor.of(tensor)) for name, tensor in sharded.items()]
    publisher = WeightPublisher(SECTION, "bench", "cpu") if own == 0 else None
    config = SimpleNamespace(weights=SECTION, learner=LearnerSection(), engine=SimpleNamespace(weights="auto"))
    sent, found = list[int](), {"shard_bytes": sum(each.to_local().nbytes for each in sharded.values())}
    count_sent(sent)
    divided = DividedSending(config, publisher, torch.device("cpu"))
    backend = SimpleNamespace(divisible_weights=lambda: parts)
    trainer = SimpleNamespace(backend=backend, generation_dtype=torch.bfloat16, device=torch.device("cpu"))
    if publisher:
        (folder / "address.partial").write_text(publisher.address)
        (folder / "address.partial").rename(folder / "address")
    step, seconds = 0, dict[str, float]()
    with PeakMemory() as peak:
        for count in workers:
            while publisher and sum(c.state == "ready" for c in list(publisher._channels.values())) < count:
                (folder / f"wanted_{count}").touch()
                time.sleep(0.01)
            for _ in range(2):
                dist.barrier()
                began = time.perf_counter()
                part = divided.gather(trainer, Version(0, step))
                gathered = time.perf_counter()
                if publisher:
                    figures = publisher.publish(Version(0, step), part)
                    assert figures["publish_workers"] == count, figures
                    seconds[f"gather_s_{count}"] = gathered - began
                    seconds[f"update_s_{count}"] = time.perf_counter() - began
                del part
                dist.barrier()
                step += 1
    found |= {"extra_bytes": peak.extra_bytes, "sent_bytes": sum(sent)}
    by_rank = all_gather_values(found, dict[str, int])
    if publisher:
        publisher.withdraw()
    dist.barrier()
    with PeakMemory() as peak:  # all on rank 0
        whole = gather_tensors(sharded.items())
        if publisher:
            publisher.publish(Version(0, step), whole)
        dist.barrier()
    if publisher:
        result = {"ranks": by_rank, "undivided_extra_bytes": peak.extra_bytes, "seconds": seconds}
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()


def worker(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    receiver = WeightReceiver(SECTION, f"{name}-{time.monotonic_ns()}", name, "cpu")
    receiver.connect((folder / "address").read_text())
    while not (folder / "result.json").exists():
        if staged := receiver.take():
            receiver.loaded(staged.version)
            del staged
        time.sleep(0.002)


if __name__ == "__main__":
    kind, given = sys.argv[1], sys.argv[2:]
    if kind == "worker":
        worker(given[0], Path(given[1]))
    else:
        rank(int(given[0]), int(given[1]), Path(given[2]), int(given[3]), [int(word) for word in given[4].split(",")])
