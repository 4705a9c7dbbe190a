"""How long other work kept an engine from its core, as the kernel counts it: the noise of a shared machine."""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import numpy as np
from common import processor_s

LOOK_S = 0.1
"""Time between two looks (seconds)."""


class Watcher(ABC):
    """Looks at a run again and again from a thread of its own, as long as the block is entered."""

    def __init__(self):
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Look until `_over` is true."""

    def _over(self) -> bool:
        """Wait for the next look; true if there is to be none."""
        return self._ended.wait(LOOK_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self._thread.join()


class CoreTime(Watcher):
    """Measures the time in which the main thread of process `engine` could run and did not.

    `own`: processes of the engine that share its core; their work does not count.
    """

    def __init__(self, engine: int, own: tuple[int, ...] = ()):
        super().__init__()
        self.engine, self.own = engine, own
        self.readings: list[tuple[float, float]] = []
        """(monotonic time, seconds taken since the start of the engine)."""

    def _run(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while not self._over():
                waited_s = int(Path(f"/proc/{self.engine}/task/{self.engine}/schedstat").read_text().split()[1]) / 1e9
                self.readings.append((time.monotonic(), waited_s - sum(map(processor_s, self.own))))

    def taken(self, began: float, ended: float) -> float:
        """Seconds between two instants of the monotonic clock."""
        at, taken_s = zip(*self.readings, strict=True)
        first, last = np.interp([began, ended], at, taken_s)
        return max(0.0, float(last - first))


def server_processes(server: int) -> tuple[int, tuple[int, ...]]:
    """(the process of an SGLang server that runs the model, its other processes)."""
    tree = [server]
    for process in tree:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            tree += map(int, children.read_text().split())
    [scheduler] = [process for process in tree if "scheduler" in Path(f"/proc/{process}/cmdline").read_text()]
    return scheduler, tuple(process for process in tree if process != scheduler)
