"""A loss that holds a run back, so that what a test does to a live run cannot come when the run is over.

The environment of the run's processes names a file, the run's folder and a number: once so many steps are recorded, the
loss of the next one waits until the file is there. The learner may be a step ahead of the record.
"""

import os
import time
from pathlib import Path

from april.learner.losses.policy import ppo
from april.report.run_folder import read_records

GATE = "APRIL_TEST_GATE"


class Gate:
    def __init__(self, file: Path, run_dir: Path, environment):
        self.file, self.run_dir, self.environment = file, run_dir, environment

    def hold(self, steps: int) -> list[str]:
        """Words for a run that is begun now."""
        self.environment.setenv(GATE, os.pathsep.join(map(str, (self.file, self.run_dir, steps))))
        return ["--algorithm.loss", f"{__name__}:loss", "--learner.hung_s", "600"]

    def open(self) -> None:
        self.file.touch()


def loss(*columns):
    file, run_dir, steps = os.environ[GATE].split(os.pathsep)
    while not Path(file).exists() and len(read_records(Path(run_dir, "metrics.jsonl"))) >= int(steps):
        time.sleep(0.05)
    return ppo(*columns)
