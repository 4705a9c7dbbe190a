"""A pool of processes that run user code, so that it cannot hang, crash or block the calling process.

Every submitted item comes back exactly once, with an answer or an error. A process that exceeds the time limit is
killed, and one that has died is replaced; only its current item fails. A process that exits with RETIRED is replaced
without failing an item.
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
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

# --- frames on the pipes ----------------------------------------------------------------------------------------------


LENGTH_BYTES = 4
"""Size of the length prefix of a frame, which is one encoded message."""
READY = bytes(LENGTH_BYTES)
"""An empty frame: the process is ready."""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame: the length, then the message in MessagePack."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def private_pipes() -> tuple[int, BinaryIO]:
    """Move stdin and stdout out of reach of user code; returns (descriptor to read from, stream to write to).

    What user code prints then goes to stderr, and its stdin is empty.
    """
    incoming, outgoing = os.dup(0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return incoming, outgoing


def write_frame(outgoing: BinaryIO, data: bytes) -> None:
    """Write an encoded frame, and flush."""
    outgoing.write(data)
    outgoing.flush()


# --- the pool ---------------------------------------------------------------------------------------------------------


IN_FLIGHT_ITEMS = 4
"""Most items sent to a new process: one to work on, and others so that it need not wait for the pool's next poll."""
MOST_AHEAD = 64
"""Largest factor on the number of items in flight, for a process that has finished all its items at every poll.

Polls are rare: decode steps lie between them."""
SLOW_S = 0.1
"""Time of one item (s) above which its process gets fewer items in advance."""
START_LIMIT_S = 60.0
"""Longest start of a process (s); one that is not ready by then is replaced."""
ORPHAN_MARGIN_S = 5.0
"""Time after an item's time limit at which a process ends itself, in case its pool has died and cannot kill it."""
RETIRED = 75
"""Exit status of a process that asks to be replaced, for example because it has run out of memory."""

ItemT = TypeVar("ItemT", bound=msgspec.Struct)
AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)
"""Types of the items and of the answers; both have a field `key`."""


@dataclass(frozen=True)
class Failure:
    """Why a process has to be replaced."""

    text: str
    timed_out: bool = False
    """Whether the process exceeded the time limit of its item."""


class ProcessPool(Generic[ItemT, AnswerT]):
    def __init__(self, processes: int):
        self.queue: deque[ItemT] = deque()
        self.processes = [self.start_process() for _ in range(processes)]

    def start_process(self) -> "PoolProcess":
        raise NotImplementedError

    def charge(self, item: ItemT, failure: str) -> AnswerT:
        """The error answer for an item whose process failed."""
        raise NotImplementedError

    def retry(self, item: ItemT, failure: Failure) -> ItemT | None:
        """The item to try instead of one whose process failed; None: the item gets the failure as its answer."""
        return None

    def in_flight_limit(self, item: ItemT) -> int:
        """Most items that a process given this item may have in flight at first; see `PoolProcess.ahead`."""
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
            process.adapt_ahead(bool(answered), waited=bool(self.queue))
            answers += answered
            failure = process.failure()
            if failure or process.has_retired():
                answers += self.replace(index, failure)
            else:
                process.flush()
        self.dispatch()
        return answers

    def dispatch(self) -> None:
        """Send queued items to the processes with the fewest items."""
        while self.queue:
            index = min(range(len(self.processes)), key=lambda i: len(self.processes[i].in_flight))
            process = self.processes[index]
            if len(process.in_flight) >= self.in_flight_limit(self.queue[0]) * process.ahead:
                return
            if not process.in_flight and process.has_exited():
                self.replace(index, None)
            self.processes[index].send(self.queue.popleft())

    def replace(self, index: int, failure: Failure | None) -> list[AnswerT]:
        """Replace a process. A failure is charged to its first item; its other items return to the queue."""
        ended = self.processes[index]
        ended.kill()
        waiting: list[ItemT] = list(ended.in_flight)
        charged: list[AnswerT] = []
        if failure and waiting:
            retried = self.retry(waiting[0], failure)
            charged = [] if retried else [self.charge(waiting[0], failure.text)]
            waiting[:1] = [retried] if retried else []
        self.queue.extendleft(reversed(waiting))
        self.processes[index] = self.start_process()
        return charged

    def close(self) -> None:
        """End all processes; pending items are lost."""
        for process in self.processes:
            process.kill()


class PoolProcess:
    """One operating-system process and its items, which it answers in order.

    It runs `module` with the time limit and `rules` as arguments; its answers are of the type `answer`.
    """

    def __init__(self, module: str, rules: msgspec.Struct, timeout_s: float, answer: Any, prints: Path | None = None):
        """`prints`: file to which the output of user code is appended; by default it goes to this process's stderr."""
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
        """Factor on the pool's `in_flight_limit`: low for a slow process, so that few items wait if it hangs; high for
        a fast one, so that it does not wait for polls."""
        self.unsent, self.unread = bytearray(), bytearray()
        self.ready = self.ended = False
        self.busy_since_s = time.monotonic()
        """Monotonic time at which the process started, or began its first item in flight, as far as the pool knows."""

    def send(self, item: msgspec.Struct) -> None:
        if not self.in_flight and self.ready:
            self.busy_since_s = time.monotonic()
        self.in_flight.append(item)
        self.unsent += frame(item)
        self.flush()

    def adapt_ahead(self, answered: bool, waited: bool) -> None:
        """Adapt `ahead` after a poll. `answered`: it has returned answers; `waited`: items wait in the pool's queue."""
        if waited and answered and not self.in_flight:
            self.ahead = min(2 * self.ahead, MOST_AHEAD)
        elif self.in_flight and not answered and time.monotonic() - self.busy_since_s > SLOW_S:
            self.ahead = max(1, self.ahead // 2)

    def flush(self) -> None:
        """Write as much as the pipe accepts."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self._stdin.fileno(), self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()

    def receive(self) -> list[Any]:
        """Answers that have arrived in the pipe."""
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
        """Why this process has to be replaced; None if it does not."""
        if self.ended and self.has_exited():
            how = describe_exit(self.inner.returncode)
            return None if self.has_retired() else Failure(f"its process ended ({how})")
        limit_s = self.timeout_s if self.ready else START_LIMIT_S
        if self.in_flight and time.monotonic() - self.busy_since_s > limit_s:
            return Failure(f"{'no answer' if self.ready else 'no start'} within {limit_s:g} s", timed_out=self.ready)
        return None

    def has_retired(self) -> bool:
        return self.ended and self.inner.poll() == RETIRED

    def has_exited(self) -> bool:
        return self.inner.poll() is not None

    def kill(self) -> None:
        """Kill the process and its process group."""
        if self.inner.returncode is None:
            os.killpg(self.inner.pid, signal.SIGKILL)
            self.inner.wait()
        self._stdin.close()
        self._stdout.close()


def describe_exit(returncode: int) -> str:
    """How a process ended, for an error sentence."""
    if returncode == -signal.SIGALRM:
        return "its time limit was exceeded"
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
