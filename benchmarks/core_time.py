"""How long an engine was kept from its core by strangers, as the kernel counts: the noise of a shared machine."""

import contextlib
import os
import time
from pathlib import Path

import numpy as np
from watcher import Watcher

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreTime(Watcher):
    """Watches the main thread of process `engine`: the time in which it could run and did not.

    `beside`: processes that share the core with it and belong to it, whose work is no stranger's.
    """

    def __init__(self, engine: int, beside: tuple[int, ...] = ()):
        super().__init__()
        self.engine, self.beside = engine, beside
        self.readings: list[tuple[float, float]] = []
        """(monotonic time, seconds taken since its start)"""

    def _run(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while not self._over():
                waited_s = int(Path(f"/proc/{self.engine}/task/{self.engine}/schedstat").read_text().split()[1]) / 1e9
                self.readings.append((time.monotonic(), waited_s - sum(map(processor_s, self.beside))))

    def taken(self, began: float, ended: float) -> float:
        """Seconds between two instants of the monotonic clock."""
        at, taken_s = zip(*self.readings, strict=True)
        first, last = np.interp([began, ended], at, taken_s)
        return max(0.0, float(last - first))


def processor_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def server_processes(server: int) -> tuple[int, tuple[int, ...]]:
    """(the one of an SGLang server that runs the model, the others)."""
    tree, place = [server], 0
    while place < len(tree):
        for children in Path(f"/proc/{tree[place]}/task").glob("*/children"):
            tree += map(int, children.read_text().split())
        place += 1
    [scheduler] = [one for one in tree if "scheduler" in Path(f"/proc/{one}/cmdline").read_text()]
    return scheduler, tuple(one for one in tree if one != scheduler)
