"""Who has the accelerators that learner and engines take turns on: locks of the kernel, on files of the run's folder.

Engines have a turn together, the learner alone. That it wants one it says by another lock, which engines look at.

    engines:  none -> [weights have come, and the learner wants none] -> a turn -> [it wants one, nothing runs] -> none
    learner:  none -> [a batch has come] -> wants one -> [no engine has one] -> a turn -> [all is on the host] -> none

A process that is killed lets go by that, so nobody has to be told, and nothing has to be put right afterwards.
"""

import fcntl
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from april.processes import clock

FOLDER = "turns"
"""in the run's folder"""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""what a part's environment says of its accelerators"""
POLL_S = 0.02


class TurnLate(RuntimeError):
    """Others have not let go of an accelerator in time; the text says who."""


class Turns:
    """Of one process, on accelerators that are the same to all by their names."""

    def __init__(self, run_dir: Path, names: Sequence[str]):
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        files = [re.sub(r"[^\w.-]", "_", name) for name in names]
        self._wanted = [open_lock(folder / f"{file}.wanted") for file in files]
        self._had = [open_lock(folder / f"{file}.had") for file in files]
        self.has = False

    def close(self) -> None:
        for descriptor in (*self._had, *self._wanted):
            os.close(descriptor)


class EngineTurns(Turns):
    @property
    def wanted(self) -> bool:
        """Whether the learner has a turn, or waits for one."""
        return not all(map(is_free, self._wanted))

    def take(self) -> bool:
        """Whether it has one now, which it gets where the learner wants none."""
        if not self.has and not self.wanted:
            self.has = all(locked(descriptor, fcntl.LOCK_SH) for descriptor in self._had)
            if not self.has:
                self.give()
        return self.has

    def wait(self, patience_s: float) -> None:
        """Until it has one. Raises TurnLate."""
        deadline = clock.now() + patience_s
        while not self.take():
            if clock.now() > deadline:
                raise TurnLate(
                    f"the learner has not let go of the accelerator within devices.turn_s = {patience_s:g} s; its log "
                    "says what it does, or raise that"
                )
            time.sleep(POLL_S)

    def give(self) -> None:
        self.has = False
        for descriptor in self._had:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class LearnerTurns(Turns):
    def take(self, patience_s: float) -> float:
        """Seconds until no engine had one. Raises TurnLate."""
        began = clock.now()
        for descriptor in (*self._wanted, *self._had):
            while not locked(descriptor, fcntl.LOCK_EX):
                if clock.now() > began + patience_s:
                    raise TurnLate(
                        f"workers have not let go of the accelerator within devices.turn_s = {patience_s:g} s; their "
                        "logs say what they do, or raise that"
                    )
                time.sleep(POLL_S)
        self.has = True
        return clock.now() - began

    def give(self) -> None:
        self.has = False
        for descriptor in (*self._had, *self._wanted):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def names_here(device: str) -> list[str]:
    """Of the accelerators that this process sees; of a CPU, which takes their place in tests, its own."""
    if device == "cpu":
        return ["cpu"]
    import torch

    named = next(filter(None, map(os.environ.get, VARIABLES)), None)
    return named.split(",") if named else list(map(str, range(torch.cuda.device_count())))


def open_lock(path: Path) -> int:
    """A child does not inherit it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_free(descriptor: int) -> bool:
    free = locked(descriptor, fcntl.LOCK_SH)
    if free:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return free
