"""One rank of a learner that publishes in parts, in a process of its own: rank 0 prints its publisher's address. Once
there is a file `publish_STEP` beside the file in which the ranks meet, it publishes the weights of that step and prints
the figures.

Its arguments: its rank, the number of ranks, the file in which they meet, the transport, deadlines in seconds to
publish and to transfer, and `weights.delta`.
"""

import json
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from april.config import LearnerSection, WeightsSection
from april.learner.held_tensors import HeldTensor
from april.learner.process_group import long_wait_group
from april.learner.publication import DividedSending
from april.learner.weight_parts import WeightTensor
from april.weights.publisher import WeightPublisher
from april.wire.message import Version

ROWS = {"table.weight": 3001, "layers.0.q_proj.weight": 64, "layers.0.k_proj.weight": 7, "layers.0.norm.weight": 2}
"""Number of rows of each tensor, of 2000 values each; the second rank of three has no row of the last."""
PLACEMENTS = {"table": Shard(0), "q_proj": Shard(1), "k_proj": Shard(0), "norm": Replicate()}
"""How the ranks hold each tensor, by the layer's name."""


def weights(step: int) -> dict[str, torch.Tensor]:
    """The whole weights of a step, fp32."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(rows, 2000, generator=generator) for name, rows in ROWS.items()}


def main(rank: int, ranks: int, store: str, transport: str, publish_s: float, transfer_s: float, delta: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (ranks,))
    section = WeightsSection(
        senders="all", transport=transport, delta=delta, publish_deadline_s=publish_s, transfer_deadline_s=transfer_s
    )
    config = SimpleNamespace(weights=section, learner=LearnerSection(), engine=SimpleNamespace(weights="broadcast"))
    publisher = WeightPublisher(section, "test", "cpu") if rank == 0 else None
    waiting, divided = long_wait_group(), DividedSending(config, publisher, torch.device("cpu"))
    if publisher:
        print(publisher.address, flush=True)
    for step in count():
        while publisher and not Path(store).with_name(f"publish_{step}").exists():
            divided.check()
            time.sleep(0.005)
        dist.barrier(waiting)
        sharded = [
            WeightTensor.whole(name, HeldTensor.of(distribute_tensor(tensor, mesh, [PLACEMENTS[name.split(".")[-2]]])))
            for name, tensor in weights(step).items()
        ]
        backend = SimpleNamespace(divisible_weights=lambda tensors=sharded: tensors)
        trainer = SimpleNamespace(backend=backend, generation_dtype=None, device=torch.device("cpu"))
        part = divided.gather(trainer, Version(0, step))
        if publisher:
            print(json.dumps(publisher.publish(Version(0, step), part)), flush=True)


if __name__ == "__main__":
    own, all_ranks, path, kind, publish, transfer, deltas = sys.argv[1:]
    main(int(own), int(all_ranks), path, kind, float(publish), float(transfer), deltas)
