"""A learner's step that holds a run back, so that what a test does to a live run cannot come when the run is over.

The environment of the run's processes names a file, the run's folder and a number: once so many steps are recorded, the
next one waits until the file is there, also where nothing of its batch has a gradient and no loss would be asked. The
learner may be a step ahead of the record. Under a trainer of others, whose steps are its own, the reward of what comes
next waits.
"""

import os
import time
from pathlib import Path

from april.observe.report.run_folder import read_records
from april.workers.rewards.text import final_answer

GATE = "APRIL_TEST_GATE"


class Gate:
    def __init__(self, file: Path, run_dir: Path, environment):
        self.file, self.run_dir, self.environment = file, run_dir, environment

    def hold(self, steps: int) -> list[str]:
        """Words for a run that is begun now."""
        self.set(steps)
        return ["--algorithm.step_scale", f"{__name__}:step_scale", "--learner.hung_s", "600"]

    def hold_rewards(self, steps: int) -> list[str]:
        """The same for a trainer of others."""
        self.set(steps)
        return ["--reward.name", f"{__name__}:reward", "--reward.timeout_s", "600"]

    def set(self, steps: int) -> None:
        self.environment.setenv(GATE, os.pathsep.join(map(str, (self.file, self.run_dir, steps))))

    def open(self) -> None:
        self.file.touch()


def step_scale(figures):
    """Every step has one, whatever it trains."""
    wait_at_the_gate()
    return 1.0


def reward(response, label, finish_reason):
    wait_at_the_gate()
    return final_answer(response, label, finish_reason)


def wait_at_the_gate():
    """Or until whoever has started this process is gone."""
    file, run_dir, steps = os.environ[GATE].split(os.pathsep)
    parent = os.getppid()
    while not Path(file).exists() and len(read_records(Path(run_dir, "metrics.jsonl"))) >= int(steps):
        assert os.getppid() == parent, "the run was ended at the gate"
        time.sleep(0.05)
