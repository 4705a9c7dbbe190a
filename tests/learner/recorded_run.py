"""Run under torchrun by the tests of killed ranks: a learner on a recorded stream of deliveries.

In its folder: `config.json`; `held.json`, steps by start: that of a start has no batch, until its ranks are killed;
`pid_RANK` of each live rank; `consumed.jsonl`, a line for each report, as [start of the ranks, step, [loss, that of the
critic]]. With a file `own_disks` each rank has a disk of its own, at each start one that is as many further as it says.
With 1 rank 0 is where rank 1 was, whose disk is empty, and the one of rank 0 is lost. With 2 all are.
"""

import os
import sys
import time
from pathlib import Path

import orjson
import torch.distributed as dist

from april.config import Config
from april.learner import loop, process_group
from april.learner.trainer import Trainer
from april.util.lifetime import exit_at_once
from tests.support.learner.small_learner import Diary, on_disk

STEPS = 9


class RecordedStream(Diary):
    """Source whose batch k is always the same, and whose reports outlive the process."""

    def __init__(self, policy: Path, log: Path, restart: int, held: list[int]):
        consumed = {orjson.loads(line)[1] for line in log.read_bytes().splitlines()} if log.exists() else set()
        super().__init__(policy, STEPS, incarnation=restart, frontier=max(consumed, default=-1) + 1)
        self.log, self.restart, self.held = log, restart, held[restart : restart + 1]

    def fetch(self, step):
        while step in self.held:
            time.sleep(0.05)
        return super().fetch(step)

    def consumed(self, step, metrics, discarded=""):
        loss = [metrics["loss"], metrics.get("value_loss", 0.0)]
        with self.log.open("ab") as file:
            file.write(orjson.dumps([self.restart, step, loss], option=orjson.OPT_APPEND_NEWLINE))


def main(folder: Path) -> None:
    config = Config.model_validate(orjson.loads((folder / "config.json").read_bytes()))
    device = process_group.join(config.learner)
    rank = dist.get_rank()
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if (folder / "own_disks").exists():
        config = on_disk(config, rank + restart * int((folder / "own_disks").read_text()))
    held = orjson.loads((folder / "held.json").read_bytes())
    stream = RecordedStream(config.model.path, folder / "consumed.jsonl", restart, held) if rank == 0 else None
    loop.run(config, Trainer(config, device), stream, stream)
    process_group.leave()
    exit_at_once(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
