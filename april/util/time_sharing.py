"""Time sharing of accelerators between the learner and engines, by kernel locks (flock) on files in the run folder.

Engines hold a time slice together, the learner alone. The learner requests one with a second lock, which engines check.

    engines:  none -> [weights have arrived, no request] -> slice -> [request, nothing in generation] -> none
    learner:  none -> [a batch has arrived] -> request -> [no engine has a slice] -> slice -> [all offloaded] -> none

The kernel releases the locks of a process that is killed, so a crash needs no cleanup.
"""

import fcntl
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from april.util import clock
from april.util.files import open_lock

FOLDER = "turns"
"""Folder of the lock files in the run folder."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Environment variables that list a process's accelerators."""
POLL_S = 0.02


class TimeSliceLate(RuntimeError):
    """The other side has not released an accelerator in time; the text says which side."""


class TimeSharing:
    """One process's locks on its accelerators. They are files named after the accelerators (`names`), so all processes
    have to use the same names."""

    def __init__(self, run_dir: Path, names: Sequence[str]):
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        files = [re.sub(r"[^\w.-]", "_", name) for name in names]
        self._request_locks = [open_lock(folder / f"{file}.wanted") for file in files]
        self._slice_locks = [open_lock(folder / f"{file}.had") for file in files]
        self.has_slice = False

    def close(self) -> None:
        for descriptor in (*self._slice_locks, *self._request_locks):
            os.close(descriptor)


class EngineTimeSharing(TimeSharing):
    @property
    def is_requested(self) -> bool:
        """Whether the learner has a time slice or waits for one."""
        return not all(map(is_free, self._request_locks))

    def take(self) -> bool:
        """Take a time slice unless the learner requests one; returns whether this process has a time slice now."""
        if not self.has_slice and not self.is_requested:
            self.has_slice = all(try_lock(descriptor, fcntl.LOCK_SH) for descriptor in self._slice_locks)
            if not self.has_slice:
                self.release()
        return self.has_slice

    def wait(self, patience_s: float) -> None:
        """Wait until this process has a time slice. Raises TimeSliceLate after `patience_s`."""
        deadline = clock.now() + patience_s
        while not self.take():
            if clock.now() > deadline:
                raise TimeSliceLate(
                    f"the learner has not let go of the accelerator within devices.turn_s = {patience_s:g} s; its log "
                    "says what it does, or raise that"
                )
            time.sleep(POLL_S)

    def release(self) -> None:
        self.has_slice = False
        for descriptor in self._slice_locks:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class LearnerTimeSharing(TimeSharing):
    def take(self, patience_s: float) -> float:
        """Wait for a time slice and take it; returns the seconds waited. Raises TimeSliceLate after `patience_s`."""
        began = clock.now()
        for descriptor in (*self._request_locks, *self._slice_locks):
            while not try_lock(descriptor, fcntl.LOCK_EX):
                if clock.now() > began + patience_s:
                    raise TimeSliceLate(
                        f"workers have not let go of the accelerator within devices.turn_s = {patience_s:g} s; their "
                        "logs say what they do, or raise that"
                    )
                time.sleep(POLL_S)
        self.has_slice = True
        return clock.now() - began

    def release(self) -> None:
        self.has_slice = False
        for descriptor in (*self._slice_locks, *self._request_locks):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def accelerator_names(device: str) -> list[str]:
    """Names of the accelerators that this process sees; ["cpu"] for a CPU, which stands in for them in tests."""
    if device == "cpu":
        return ["cpu"]
    import torch

    named = next(filter(None, map(os.environ.get, VARIABLES)), None)
    return named.split(",") if named else list(map(str, range(torch.cuda.device_count())))


def try_lock(descriptor: int, kind: int) -> bool:
    """Take the file lock `kind` (`fcntl.LOCK_SH` or `LOCK_EX`) without waiting; returns whether that succeeded."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_free(descriptor: int) -> bool:
    """Whether no process holds the exclusive lock of the open lock file `descriptor`."""
    free = try_lock(descriptor, fcntl.LOCK_SH)
    if free:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return free
