"""One rank of a learner that publishes in parts, in a process of its own: rank 0 prints its publisher's address. Once
there is a file `publish_STEP` beside the file in which the ranks meet, it publishes the weights of that step and prints
the figures.

Its arguments: its rank, the number of ranks, the file in which they meet, the transport, deadlines in seconds to
publish and to transfer, `weights.delta`, `weights.senders`, and the folder of the base model if an adapter is trained.
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
from april.weights.base import AdapterWeights, BaseWeights
from april.weights.channel import Adapter
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


def adapted(folder: Path, step: int) -> AdapterWeights:
    """What is trained of a step, where the model of a folder has an adapter."""
    generator, shapes = torch.Generator().manual_seed(step), {"layers.0.norm.weight": (2, 2000)}
    for layer in ("layers.0.q_proj", "layers.0.k_proj"):
        shapes |= {f"{layer}.lora_A": (4, 2000), f"{layer}.lora_B": (ROWS[f"{layer}.weight"], 4)}
    trained = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    base = BaseWeights(folder)
    return AdapterWeights(trained, Adapter(base.checksum, 0.25, "bfloat16"), base)


def main(rank: int, ranks: int, store: str, section: WeightsSection, model: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (ranks,))
    engine = SimpleNamespace(weights="broadcast" if section.senders == "all" else "disk")
    config = SimpleNamespace(weights=section, learner=LearnerSection(), engine=engine)
    publisher = WeightPublisher(section, "test", "cpu") if rank == 0 else None
    base = BaseWeights(Path(model)) if model else None
    backend = SimpleNamespace(adapter_base=base, divisible_weights=lambda: sharded(0, mesh))
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
        trainer.weights_to_publish = partial(adapted, Path(model), step)
        part = divided.gather(trainer, Version(0, step)) if divided else weights(step)
        if publisher:
            print(json.dumps(publisher.publish(Version(0, step), part)), flush=True)


if __name__ == "__main__":
    own, all_ranks, path, kind, publish, transfer, deltas, senders, folder = sys.argv[1:]
    deadlines = {"publish_deadline_s": float(publish), "transfer_deadline_s": float(transfer)}
    chosen = WeightsSection(transport=kind, delta=deltas, senders=senders, **deadlines)
    main(int(own), int(all_ranks), path, chosen, folder)
