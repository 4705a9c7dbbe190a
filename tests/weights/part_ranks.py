"""One rank of a learner that publishes in parts, in a process of its own: rank 0 prints its publisher's address. Once
there is a file `publish_STEP` beside the file in which the ranks meet, it publishes the weights of that step and prints
the figures.

Its arguments: its rank, the number of ranks, the file in which they meet, the transport, deadlines in seconds to
publish and to transfer, `weights.delta` and `weights.senders`.
"""

import json
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def sharded(step: int, mesh: DeviceMesh) -> list[WeightTensor]:
    """The weights of a step as the ranks hold them."""
    return [
        WeightTensor.whole(name, HeldTensor.of(distribute_tensor(tensor, mesh, [PLACEMENTS[name.split(".")[-2]]])))
        for name, tensor in weights(step).items()
    ]


def main(rank: int, ranks: int, store: str, section: WeightsSection) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (ranks,))
    engine = SimpleNamespace(weights="broadcast" if section.senders == "all" else "disk")
    config = SimpleNamespace(weights=section, learner=LearnerSection(), engine=engine)
    publisher = WeightPublisher(section, "test", "cpu") if rank == 0 else None
    backend = SimpleNamespace(publishes_adapter=False, divisible_weights=lambda: sharded(0, mesh))
    trainer = SimpleNamespace(config=config, backend=backend, generation_dtype=None, device=torch.device("cpu"))
    waiting, divided = long_wait_group(), DividedSending.start(trainer, publisher)
    if publisher:
        print(publisher.address, flush=True)
    for step in count():
        while publisher and not Path(store).with_name(f"publish_{step}").exists():
            if divided:
                divided.check()
            time.sleep(0.005)
        dist.barrier(waiting)
        backend.divisible_weights = partial(sharded, step, mesh)
        part = divided.gather(trainer, Version(0, step)) if divided else weights(step)
        if publisher:
            print(json.dumps(publisher.publish(Version(0, step), part)), flush=True)


if __name__ == "__main__":
    own, all_ranks, path, kind, publish, transfer, deltas, senders = sys.argv[1:]
    deadlines = {"publish_deadline_s": float(publish), "transfer_deadline_s": float(transfer)}
    main(int(own), int(all_ranks), path, WeightsSection(transport=kind, delta=deltas, senders=senders, **deadlines))
