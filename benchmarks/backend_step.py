"""Run under April's launcher by learner.py, in .venv-megatron: seconds of a step of two learners on the same ranks.

The learners take turns on one batch, and at going first; rank 0 writes what each turn took, but the first.
"""

import sys
import time
from functools import partial
from pathlib import Path

import orjson
import torch
import torch.distributed as dist

from april.config import Config
from april.learner import process_group
from april.learner.batch import decode
from april.learner.trainer import Trainer
from april.processes.lifetime import end


def seconds(step) -> float:
    dist.barrier()
    began = time.perf_counter()
    assert not step()["update_skipped"]
    dist.barrier()
    return time.perf_counter() - began


def main(folder: Path, rounds: int) -> None:
    run = orjson.loads((folder / "run.json").read_bytes())
    base = run["base"]
    configs = [Config.model_validate(base | {"learner": base["learner"] | keys}) for keys in run["learners"]]
    device = process_group.join(configs[0].learner)
    batch = decode((folder / "batch.msgpack").read_bytes())
    steps = [partial(Trainer(config, device).step, batch) for config in configs]
    turns = []
    for turn in range(rounds + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {side: seconds(steps[side]) for side in order}
        turns.append([taken[0], taken[1]])
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_bytes(orjson.dumps(turns[1:]))
    process_group.leave()
    end(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
