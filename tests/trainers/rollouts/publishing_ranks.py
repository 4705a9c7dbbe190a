"""Run in ranks: each rank iterates and publishes a sharded model; FOLDER/seen.json is what came of it."""

import sys
from datetime import timedelta
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from april.config import load
from april.learner.process_group import long_wait_group, rendezvous_of_this_start
from april.trainers.rollouts.run import Rollouts
from april.util.lifetime import exit_at_once
from tests.support.recording_broker import RecordingBroker


def main(config_file: str, folder: Path) -> None:
    dist.init_process_group("gloo", **rendezvous_of_this_start(timedelta(minutes=5)))
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(3, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    broker = RecordingBroker(2, frontier=1) if dist.get_rank() == 0 else None
    seen = []
    with Rollouts(load(config_file), 0, broker, broker, long_wait_group()) as run:
        for batch in run.batches():
            seen.append([batch.step, *batch.input_ids.tolist()])
            run.consumed(batch)
            run.publish(model)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, seen)
    if broker:
        shapes = {name: list(tensor.shape) for name, tensor in broker.weights[2].items()}
        (folder / "seen.json").write_bytes(orjson.dumps({"ranks": of_ranks, "said": broker.calls, "shapes": shapes}))
    dist.barrier()
    exit_at_once(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
