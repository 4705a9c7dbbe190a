"""Foreign code at work in processes of its own, so that none of it can hang, crash or block the one that asks.

Every submitted item comes back exactly once, with an answer or with an error. A process that exceeds the time limit is
killed, one that has died is replaced; only the item it was at is charged with it. One that exits with RETIRED has
answered, and is replaced without blame.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from april.processes.frames import LENGTH_BYTES, frame

IN_FLIGHT_ITEMS = 4
"""Handed to a process at first: one at work, the others so that it need not wait for the next poll."""
MOST_AHEAD = 64
"""times as many for one that is done with all of them at every poll, because decode steps lie between two"""
SLOW_S = 0.1
"""an item that takes longer has its process given fewer ahead"""
START_LIMIT_S = 60.0
"""a process that is not ready by then is replaced; one whose pool has died ends itself"""
ORPHAN_MARGIN_S = 5.0
"""A process ends itself this long after the time limit, in case its pool is no longer there to do it."""
RETIRED = 75
"""exit status of a process that asks for another in its place, such as one that had no memory left"""

ItemT = TypeVar("ItemT", bound=msgspec.Struct)
AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)
"""what processes are given and what they answer; both have a `key`"""


@dataclass(frozen=True)
class Failure:
    """Why a process cannot go on."""

    text: str
    of_time: bool = False
    """its item took longer than the time limit"""


class ProcessPool(Generic[ItemT, AnswerT]):
    def __init__(self, processes: int):
        self.queue: deque[ItemT] = deque()
        self.processes = [self.start_process() for _ in range(processes)]

    def start_process(self) -> "PoolProcess":
        raise NotImplementedError

    def charge(self, item: ItemT, failure: str) -> AnswerT:
        """The answer to an item that its process has failed at."""
        raise NotImplementedError

    def again(self, item: ItemT, failure: Failure) -> ItemT | None:
        """What is tried in the place of such an item; none: it is charged."""
        return None

    def room(self, item: ItemT) -> int:
        """Items that a process which gets this one may have in flight at first; see `PoolProcess.ahead`."""
        return IN_FLIGHT_ITEMS

    @property
    def pending(self) -> int:
        """Items submitted and not yet returned by `poll`."""
        return len(self.queue) + sum(len(process.in_flight) for process in self.processes)

    def poll(self) -> list[AnswerT]:
        """Answers that have arrived since the last call."""
        if not self.pending:
            return []
        answers: list[AnswerT] = []
        for index, process in enumerate(self.processes):
            answered = process.receive()
            process.pace(bool(answered), waited=bool(self.queue))
            answers += answered
            failure = process.failure()
            if failure or process.has_retired():
                answers += self.replace(index, failure)
            else:
                process.flush()
        self.dispatch()
        return answers

    def dispatch(self) -> None:
        """Hand queued items to the processes that have the fewest."""
        while self.queue:
            index = min(range(len(self.processes)), key=lambda i: len(self.processes[i].in_flight))
            if len(self.processes[index].in_flight) >= self.room(self.queue[0]) * self.processes[index].ahead:
                return
            if not self.processes[index].in_flight and self.processes[index].has_exited():
                self.replace(index, None)
            self.processes[index].send(self.queue.popleft())

    def replace(self, index: int, failure: Failure | None) -> list[AnswerT]:
        """A new process in the place of one that has ended: a failure is its first item's, the others wait again."""
        ended = self.processes[index]
        ended.kill()
        waiting: list[ItemT] = list(ended.in_flight)
        charged: list[AnswerT] = []
        if failure and waiting:
            again = self.again(waiting[0], failure)
            charged = [] if again else [self.charge(waiting[0], failure.text)]
            waiting[:1] = [again] if again else []
        self.queue.extendleft(reversed(waiting))
        self.processes[index] = self.start_process()
        return charged

    def close(self) -> None:
        """Ends all processes; what is pending is lost."""
        for process in self.processes:
            process.kill()


class PoolProcess:
    """One operating-system process and the items it has been given, answered in order.

    `module` is run with its time limit and the `rules`; what it answers is of the type `answer`.
    """

    def __init__(self, module: str, rules: msgspec.Struct, timeout_s: float, answer: Any, prints: Path | None = None):
        """`prints`: takes what foreign code prints, behind what is there; by default this process's stderr does."""
        self.timeout_s = timeout_s
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(answer)
        limit, encoded = str(timeout_s + ORPHAN_MARGIN_S), msgspec.json.encode(rules).decode()
        with prints.open("ab") if prints else contextlib.nullcontext() as errors:
            self.inner = subprocess.Popen(
                [sys.executable, "-m", module, limit, encoded],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        assert self.inner.stdin and self.inner.stdout
        self._stdin, self._stdout = self.inner.stdin, self.inner.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self.in_flight: deque[Any] = deque()
        self.ahead = 1
        """times the pool's `room` that it may have in flight: one that hangs keeps few items waiting, and one that is
        quick never waits for a poll"""
        self.unsent, self.unread = bytearray(), bytearray()
        self.ready = self.ended = False
        self.busy_since_s = time.monotonic()
        """start, or when the first item in flight became the first, as far as the pool can know"""

    def send(self, item: msgspec.Struct) -> None:
        if not self.in_flight and self.ready:
            self.busy_since_s = time.monotonic()
        self.in_flight.append(item)
        self.unsent += frame(item)
        self.flush()

    def pace(self, answered: bool, waited: bool) -> None:
        """After a poll: whether it has answered anything, and whether items have waited for that."""
        if waited and answered and not self.in_flight:
            self.ahead = min(2 * self.ahead, MOST_AHEAD)
        elif self.in_flight and not answered and time.monotonic() - self.busy_since_s > SLOW_S:
            self.ahead = max(1, self.ahead // 2)

    def flush(self) -> None:
        """Write what the pipe takes."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self._stdin.fileno(), self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()

    def receive(self) -> list[Any]:
        """Answers that lie in the pipe."""
        try:
            while data := os.read(self._stdout.fileno(), 65536):
                self.unread += data
            self.ended = True
        except BlockingIOError:
            pass
        return list(self.parse())

    def parse(self) -> Iterator[Any]:
        while len(self.unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self.unread[:LENGTH_BYTES], "little")
            if len(self.unread) < end:
                return
            body = bytes(self.unread[LENGTH_BYTES:end])
            del self.unread[:end]
            self.busy_since_s = time.monotonic()
            if body:
                self.in_flight.popleft()
                yield self._decoder.decode(body)
            else:
                self.ready = True

    def failure(self) -> Failure | None:
        """Why this process cannot go on, if so."""
        if self.ended and self.has_exited():
            return None if self.has_retired() else Failure(f"its process ended ({ending(self.inner.returncode)})")
        limit_s = self.timeout_s if self.ready else START_LIMIT_S
        if self.in_flight and time.monotonic() - self.busy_since_s > limit_s:
            return Failure(f"{'no answer' if self.ready else 'no start'} within {limit_s:g} s", of_time=self.ready)
        return None

    def has_retired(self) -> bool:
        return self.ended and self.inner.poll() == RETIRED

    def has_exited(self) -> bool:
        return self.inner.poll() is not None

    def kill(self) -> None:
        """Ends the process and all it has started."""
        if self.inner.returncode is None:
            os.killpg(self.inner.pid, signal.SIGKILL)
            self.inner.wait()
        self._stdin.close()
        self._stdout.close()


def ending(returncode: int) -> str:
    if returncode == -signal.SIGALRM:
        return "its time limit was exceeded"
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
