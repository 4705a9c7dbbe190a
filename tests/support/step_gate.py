"""A gate that stops a live run after a given step, so that a test can act on the run before it is over.

An environment variable of the run's processes holds the gate's file, the run folder and a number of steps. Once so many
steps are recorded, the learner's next step waits until the file exists. The gate is in the step scale, which is called
in every step, even in one without gradients. The learner may be a step ahead of the record. With an external trainer,
whose steps April does not run, the scoring of the next response waits instead.
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
        """Close the gate after `steps` steps; returns command-line options for the run."""
        self.set(steps)
        return ["--algorithm.step_scale", f"{__name__}:step_scale", "--learner.hung_s", "600"]

    def hold_rewards(self, steps: int) -> list[str]:
        """Close the gate after `steps` steps of an external trainer; returns command-line options for the run."""
        self.set(steps)
        return ["--reward.name", f"{__name__}:reward", "--reward.timeout_s", "600"]

    def set(self, steps: int) -> None:
        self.environment.setenv(GATE, os.pathsep.join(map(str, (self.file, self.run_dir, steps))))

    def open(self) -> None:
        self.file.touch()


def step_scale(figures):
    """Step scale of 1 that waits at the gate; April calls it in every step, whatever the step trains."""
    wait_at_the_gate()
    return 1.0


def reward(response, label, finish_reason):
    wait_at_the_gate()
    return final_answer(response, label, finish_reason)


def wait_at_the_gate():
    """Wait until the gate is open; fails if the parent process has ended. What is tried before the run has a folder, to
    check its parts, passes."""
    file, run_dir, steps = os.environ[GATE].split(os.pathsep)
    if not Path(run_dir).is_dir():
        return
    parent = os.getppid()
    while not Path(file).exists() and len(read_records(Path(run_dir, "metrics.jsonl"))) >= int(steps):
        assert os.getppid() == parent, "the run was ended at the gate"
        time.sleep(0.05)
