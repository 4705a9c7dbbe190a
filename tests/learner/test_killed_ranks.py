"""Real kills of ranks under torchrun: the others end at once, and all resume from the last checkpoint."""

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
from transformers import AutoModelForCausalLM

from tests.learner.recorded_run import STEPS
from tests.support.learner.small_learner import make_config
from tests.support.marks import full
from tests.support.run_processes import wait_until
from tests.support.warm_imports import Popen

PATIENCE_S = 120
FOLLOWED_S = 20
"""Seconds within which the other ranks end, on a loaded machine; torchrun polls ten times a second."""


KILLS = [(1, 3), (0, 5)]
"""(rank to kill, step whose batch is held back so that the run cannot finish first)."""


class Ranks:
    """Two ranks under torchrun, which may be restarted three times, on the recorded stream.

    `next_disk`: each rank has a disk of its own, at each start the one so many further; with 2 there is none of those
    before, and checkpoints are in a store. 0: they share one. `held`: by start, the step that has no batch.
    """

    def __init__(self, policy: Path, folder: Path, trained: dict, next_disk: int = 0, held: Sequence[int] = ()):
        folder.mkdir()
        self.folder, self.next_disk = folder, next_disk
        if next_disk:
            (folder / "own_disks").write_text(f"{next_disk}")
        store = {"checkpoint_store": f"file://{folder}/store"} if next_disk == 2 else {}
        config = make_config(policy, folder / "run", **trained, **store, checkpoint_every=2, collective_timeout_s=3600)
        (folder / "config.json").write_bytes(orjson.dumps(config.model_dump(mode="json")))
        (folder / "held.json").write_bytes(orjson.dumps(list(held)))
        launch = ["-m", "april.learner.launch", "--nproc-per-node=2", "--max-restarts=3"]
        self.process = Popen(
            [sys.executable, *launch, "-m", "tests.learner.recorded_run", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=(folder / "stderr").open("wb"),
        )

    def log(self) -> list[list]:
        """(start, step, losses) of every report."""
        path = self.folder / "consumed.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [orjson.loads(line) for line in lines]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid_{rank}").read_text())

    def wait_until(self, condition, within_s: float = PATIENCE_S) -> None:
        wait_until(condition, self, within_s)

    def finish(self) -> None:
        assert self.process.wait(PATIENCE_S) == 0, self.output

    @property
    def output(self) -> str:
        return (self.folder / "stderr").read_text()[-4000:]

    def checkpoints(self, rank: int, start: int) -> Path:
        """Reports seen by that rank after the given number of starts."""
        disk = f"disk_{rank + self.next_disk * start}" if self.next_disk else ""
        return self.folder / disk / "run" / "checkpoints"

    def weights(self, start: int = 0) -> dict:
        """Reports after the given number of starts."""
        return AutoModelForCausalLM.from_pretrained(self.checkpoints(0, start) / "policy").state_dict()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [({}, 1), full(({}, 2)), full(({}, 0)), full(({"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}}, 1))],
    ids=[
        "the model on disks that are lost",
        "the model in a store, all disks lost",
        "the model",
        "with a critic on disks that are lost",
    ],
)
def test_killed_and_unkilled_learners_have_one_loss_curve(policy_folder, tmp_path, how):
    trained, next_disk = how
    unharmed = Ranks(policy_folder, tmp_path / "unharmed", trained)
    unharmed.finish()
    killed = Ranks(policy_folder, tmp_path / "killed", trained, next_disk, [step for _, step in KILLS])
    for start, (victim, step) in enumerate(KILLS):
        killed.wait_until(lambda start=start, step=step: [start, step - 1] in [line[:2] for line in killed.log()])
        for rank in range(2):
            whole = killed.checkpoints(rank, start) / f"step_{step - 1:06d}"
            killed.wait_until(whole.is_dir)
        other = killed.pid(1 - victim)
        os.kill(killed.pid(victim), signal.SIGKILL)
        # the collectives' own timeout is an hour
        killed.wait_until(lambda other=other: not is_alive(other), within_s=FOLLOWED_S)
    killed.finish()
    losses = defaultdict(set)
    for _, step, loss in [*unharmed.log(), *killed.log()]:
        losses[step].add(tuple(loss))
    assert sorted(losses) == list(range(STEPS))
    assert all(len(of_step) == 1 for of_step in losses.values()), "a replayed step differs from its first logging"
    began = [min(step for start, step, _ in killed.log() if start == each) for each in range(3)]
    assert began == [0, 2, 4], "each goes on from what was on disk, and trains the step behind it again"
    ours, theirs = killed.weights(start=2), unharmed.weights()
    assert all(value.equal(theirs[name]) for name, value in ours.items())
