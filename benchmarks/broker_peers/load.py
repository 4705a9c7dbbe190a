"""Parts that all sides of the broker benchmark share: the load, and the processes that make it."""

import math
import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawArray
from typing import Any

from common import processor_s

START_S = 120.0
"""Longest wait for the processes of a measurement to be ready, and to end (seconds)."""

PROCESSES = multiprocessing.get_context("fork")
"""Forking is safe and quick: the benchmark's own process has no threads and no sockets."""


class BenchmarkError(RuntimeError):
    """A side that cannot be measured; the text says why and how to mend it."""


@dataclass(frozen=True)
class Load:
    """Producers are processes; each keeps `in_flight` records of its own on the way."""

    producers: int
    in_flight: int
    window_s: float
    warmup_s: float = 1.5

    def __str__(self) -> str:
        return f"{self.producers}x{self.in_flight}"


def in_own_process(work: Callable, *arguments) -> Any:
    """The result of `work(*arguments)` in a new process, for what needs one: threads, sockets, a death."""
    mine, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_tell, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        raise BenchmarkError(f"the process of {work.__module__} has failed; its error is above") from None
    finally:
        process.join()


def _tell(pipe: Connection, work: Callable, arguments: tuple) -> None:
    work(pipe.send, *arguments)


class Window:
    """When the measurement starts and ends, known to all processes; before it is opened they warm up."""

    def __init__(self):
        self._times = RawArray("d", [math.inf, math.inf])

    def open(self, seconds: float) -> None:
        now = time.monotonic()
        self._times[:] = [now, now + seconds]

    def covers(self, instant: float) -> bool:
        return self._times[0] <= instant < self._times[1]

    def over(self) -> bool:
        return time.monotonic() >= self._times[1]


class Crew:
    """The processes of one measurement: each says when it is ready, works until the window is over, hands in a result.

    with Crew() as crew:
        for number in range(4):
            crew.add(produce, number)          # produce(ready, window, number) -> result
        results = crew.work(load, server.pid)  # in the order in which they were added
    """

    def __init__(self):
        self.window = Window()
        self.server_s = 0.0
        """Processor time that the server has taken in the window."""
        self._members: dict[Connection, multiprocessing.Process] = {}
        self._heard: dict[Connection, deque[tuple[str, Any]]] = {}
        """Messages of members that have not been asked for yet."""

    def add(self, work: Callable, *arguments) -> None:
        mine, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=_member, args=(theirs, work, self.window, arguments), daemon=True)
        process.start()
        theirs.close()
        self._members[mine], self._heard[mine] = process, deque()

    def all_ready(self, within_s: float = START_S) -> None:
        """Wait for those that were added so far."""
        for pipe in self._members:
            self._hear(pipe, "ready", within_s)

    def work(self, load: Load, server: int | None = None) -> list[Any]:
        """Results of the members; `server`: the process that they all load."""
        self.watch(load.warmup_s)
        before_s = processor_s(server) if server else 0.0
        self.window.open(load.window_s)
        self.watch(load.window_s)
        self.server_s = processor_s(server) - before_s if server else 0.0
        return [self._hear(pipe, "result", START_S) for pipe in self._members]

    def watch(self, seconds: float) -> None:
        """Wait while they work. Raises BenchmarkError as soon as one of them fails."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for pipe, heard in self._heard.items() if not ended(heard)], left_s):
                self._receive(pipe)

    def _hear(self, pipe: Connection, wanted: str, timeout_s: float) -> Any:
        kind, content = None, None
        while kind != wanted:
            if not self._heard[pipe]:
                if not pipe.poll(timeout_s):
                    raise BenchmarkError(
                        f"process {self._members[pipe].name} of the benchmark has hung for {timeout_s:g} s"
                    )
                self._receive(pipe)
            kind, content = self._heard[pipe].popleft()
        return content

    def _receive(self, pipe: Connection) -> None:
        try:
            kind, content = pipe.recv()
        except EOFError:
            raise BenchmarkError(f"process {self._members[pipe].name} of the benchmark has died") from None
        if kind == "error":
            raise BenchmarkError(f"a process of the benchmark has failed:\n{content}")
        self._heard[pipe].append((kind, content))

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_) -> None:
        for pipe, process in self._members.items():
            pipe.close()
            process.terminate()
            process.join(10)


def ended(heard: deque[tuple[str, Any]]) -> bool:
    """Whether a member that has said this has handed its result in."""
    return bool(heard) and heard[-1][0] == "result"


def _member(pipe: Connection, work: Callable, window: Window, arguments: tuple) -> None:
    try:
        pipe.send(("result", work(lambda: pipe.send(("ready", None)), window, *arguments)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
