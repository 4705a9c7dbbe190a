"""A pool of processes that run user code, so that it cannot hang, crash or block the calling process.

Every submitted item comes back exactly once, with an answer or an error. A process that exceeds the time limit is
killed, and one that has died is replaced; only its current item fails. A process that exits with RETIRED is replaced
without failing an item.

A thread of the pool hands an item to a process as soon as the process is free, so that no item waits behind a slow one
while another process idles, however rarely the caller polls.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from april.util.lifetime import reap
from april.util.registry import add_import_folders, python_command, python_environment

# --- channels to processes, and frames on them ------------------------------------------------------------------------


STDERR = 2
LENGTH_BYTES = 4
"""Size of the length prefix of a frame, which is one encoded message."""
READY = bytes(LENGTH_BYTES)
"""The empty frame with which a process says that it is ready for items."""
RulesT = TypeVar("RulesT")


def frame(message: Any) -> bytes:
    """Encode a message as a frame: the length, then the message in MessagePack."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def start_with_channel(*words: str, prints: int | BinaryIO = STDERR) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a Python process with the arguments `words`, in a session of its own and with this process's import path.
    Returns the process, and this side's non-blocking socket of a channel to it.

    The channel's other end is the process's stdin, so that text it prints never mixes with messages; stdout and stderr
    go to `prints`. Raises OSError.
    """
    near, far = socket.socketpair()
    with far, contextlib.ExitStack() as opened:
        opened.enter_context(near)
        process = subprocess.Popen(
            python_command(*words), stdin=far.fileno(), stdout=prints, stderr=prints, env=python_environment(),
            start_new_session=True,
        )  # fmt: skip
        opened.pop_all()
    near.setblocking(False)
    return process, near


def private_channel() -> tuple[int, BinaryIO]:
    """Prepare this process for user code, which is found on the import path and gets an empty stdin. Returns the
    channel to the parent process, which was stdin and is now out of the code's reach: (descriptor to read from, stream
    to write to)."""
    add_import_folders()
    incoming, outgoing = os.dup(0), os.fdopen(os.dup(0), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return incoming, outgoing


def read_rules(incoming: int, kind: type[RulesT]) -> RulesT:
    """Read the first frame of a channel: the settings of this process, decoded as `kind`. They are not passed on the
    command line, which every user of the machine can read, since they may hold keys."""
    size = int.from_bytes(read_exactly(incoming, LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(read_exactly(incoming, size), type=kind)


def read_exactly(incoming: int, size: int) -> bytes:
    """Read `size` bytes of a channel; ends the process if the channel has ended."""
    data = b""
    while len(data) < size:
        data += os.read(incoming, size - len(data)) or sys.exit(0)
    return data


def write_frame(outgoing: BinaryIO, data: bytes) -> None:
    """Write an encoded frame, and flush."""
    outgoing.write(data)
    outgoing.flush()


# --- the pool ---------------------------------------------------------------------------------------------------------


START_LIMIT_S = 60.0
"""Limit of a process's start (s), until it says READY; the pool replaces a process that exceeds it."""
POLL_S = 0.01
"""Interval (s) at which the pool looks whether a process that has closed its channel has ended."""
LOOK_S = 0.5
"""Interval (s) at which the pool looks whether a busy process has ended while a child of it holds the channel open."""
ORPHAN_MARGIN_S = 5.0
"""Time after an item's time limit at which a process ends itself, in case its pool has died and cannot kill it."""
RETIRED = 75
"""Exit status of a process that asks to be replaced, for example because it has run out of memory."""

ItemT = TypeVar("ItemT", bound=msgspec.Struct)
AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)
"""Type variable of the answers; an answer has the same field `key` as its item (of type ItemT)."""


@dataclass(frozen=True)
class Failure:
    """Why a process has to be replaced."""

    text: str
    timed_out: bool = False
    """Whether the process exceeded the time limit of its item."""


class ProcessPool(Generic[ItemT, AnswerT]):
    def __init__(self, processes: int):
        self.queue: deque[ItemT] = deque()
        """Items that wait for a free process."""
        self._answers: list[AnswerT] = []
        self._lock = threading.RLock()
        """Lock that guards the pool's state."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._closed = False
        self._error: Exception | None = None
        """Exception that ended the pool's thread before the pool was closed; `poll` raises it."""
        self.processes = [self.start_process() for _ in range(processes)]
        self._thread = threading.Thread(target=self._run, name="process pool", daemon=True)
        self._thread.start()

    def start_process(self) -> "PoolProcess":
        raise NotImplementedError

    def charge(self, item: ItemT, failure: str) -> AnswerT:
        """The error answer for `item`, whose process failed; `failure`: the failure in words."""
        raise NotImplementedError

    def retry(self, item: ItemT, failure: Failure) -> ItemT | None:
        """The item to queue again after `item`'s process failed, such as `item` itself; None: the failure becomes its
        answer."""
        return None

    def joins(self, item: ItemT, batch: Sequence[ItemT]) -> bool:
        """Whether a queued item is handed to a process together with the `batch` of items before it."""
        return False

    def put(self, *items: ItemT) -> None:
        """Queue items."""
        with self._lock:
            self.queue.extend(items)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._wake_writer, b"!")

    @property
    def pending(self) -> int:
        """Items submitted and not yet returned by `poll`."""
        with self._lock:
            return len(self.queue) + sum(len(process.in_flight) for process in self.processes) + len(self._answers)

    def poll(self) -> list[AnswerT]:
        """Answers that have arrived since the last call. Raises what has ended the pool's thread, such as OSError if no
        process can be started."""
        with self._lock:
            if self._error:
                raise self._error
            answers, self._answers = self._answers, []
        return answers

    def _run(self) -> None:
        try:
            while self._hand_out():
                pass
        except Exception as error:
            with self._lock:
                self._error = error

    def _hand_out(self) -> bool:
        """Do all that a `_step` can do now, then wait for new items, answers, or the next deadline of a process;
        returns False once the pool is closed."""
        waits = select.poll()
        with self._lock:
            if self._closed:
                return False
            self._step()
            waits.register(self._wake_reader, select.POLLIN)
            for process in self.processes:
                if not process.ended:
                    waits.register(process.channel, select.POLLIN | (select.POLLOUT if process.unsent else 0))
            deadlines = [process.deadline_s for process in self.processes if process.in_flight or not process.ready]
        wait_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        waits.poll(None if wait_s is None else 1000 * wait_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        return True

    def _step(self) -> None:
        """Take answers, replace failed processes, and hand queued items to the processes that are free."""
        for index, process in enumerate(self.processes):
            self._answers += process.receive()
            failure = process.failure()
            if failure or process.has_retired():
                self._replace(index, failure)
            else:
                process.flush()
        some_ready = any(process.ready for process in self.processes)
        for index, process in enumerate(self.processes):
            if not self.queue or process.in_flight or (some_ready and not process.ready):
                continue
            if self.processes[index].has_exited():
                self._replace(index, None)
            batch = [self.queue.popleft()]
            while self.queue and self.joins(self.queue[0], batch):
                batch.append(self.queue.popleft())
            self.processes[index].send(batch)

    def _replace(self, index: int, failure: Failure | None) -> None:
        """Replace the process number `index`. A `failure` is charged to its first item; its other items return to the
        queue."""
        ended = self.processes[index]
        ended.kill()
        self.processes[index] = self.start_process()  # if that fails, no item has been answered: each counts once
        waiting: list[ItemT] = list(ended.in_flight)
        if failure and waiting:
            retried = self.retry(waiting[0], failure)
            if retried is None:
                self._answers.append(self.charge(waiting[0], failure.text))
            waiting[:1] = [retried] if retried else []
        self.queue.extendleft(reversed(waiting))

    def close(self) -> None:
        """End all processes; pending items are lost. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for process in self.processes:
                process.kill()
        self._wake()
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


class PoolProcess:
    """One operating-system process and its items, which it answers in order.

    It runs `module` with the time limit as argument and gets `rules` as its first frame; its answers are of the type
    `answer`.
    """

    def __init__(self, module: str, rules: msgspec.Struct, timeout_s: float, answer: Any, prints: Path | None = None):
        """`module`: Python module that the process runs. `rules`: settings that it gets first. `timeout_s`: time limit
        of an item. `answer`: type of its answers. `prints`: file to which the output of user code is appended; None: it
        goes to this process's stderr."""
        self.timeout_s = timeout_s
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(answer)
        limit = str(timeout_s + ORPHAN_MARGIN_S)
        with prints.open("ab") if prints else contextlib.nullcontext(STDERR) as file:
            self.inner, self.channel = start_with_channel("-m", module, limit, prints=file)
        self.in_flight: deque[Any] = deque()
        self.unsent, self.unread = bytearray(frame(rules)), bytearray()
        self.flush()
        self.ready = self.ended = False
        self.busy_since_s = time.monotonic()
        """Monotonic time at which the process started, or began its first item in flight, as far as the pool knows."""

    def send(self, items: Sequence[msgspec.Struct]) -> None:
        """Give the process items to work on. The process must not have any items when this is called."""
        if self.ready:
            self.busy_since_s = time.monotonic()
        self.in_flight.extend(items)
        self.unsent += b"".join(map(frame, items))
        self.flush()

    def flush(self) -> None:
        """Write as many of the unsent bytes as the channel accepts without blocking."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.channel.fileno(), self.unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.unsent.clear()

    def receive(self) -> list[Any]:
        """Answers that have arrived."""
        has_exited = self.has_exited()  # what it wrote before is there by now
        try:
            while data := os.read(self.channel.fileno(), 65536):
                self.unread += data
            self.ended = True
        except BlockingIOError:
            self.ended = has_exited
        except ConnectionResetError:  # it ended before it had read everything
            self.ended = True
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
        """Why this process has to be replaced: it has ended unasked, or its start or its item takes too long. None if
        it need not be replaced."""
        if self.ended and self.has_exited():
            how = describe_exit(self.inner.returncode)
            return None if self.has_retired() else Failure(f"its process ended ({how})")
        if (self.in_flight or not self.ready) and time.monotonic() - self.busy_since_s > self._limit_s:
            return Failure(f"{'no answer' if self.ready else 'no start'} within {self._limit_s:g} s", self.ready)
        return None

    @property
    def _limit_s(self) -> float:
        return self.timeout_s if self.ready else START_LIMIT_S

    @property
    def deadline_s(self) -> float:
        """Monotonic time by which the pool has to look at a process that starts or has items in flight; this is very
        soon if the process has closed its channel."""
        now = time.monotonic()
        return now + POLL_S if self.ended else min(now + LOOK_S, self.busy_since_s + self._limit_s + POLL_S)

    def has_retired(self) -> bool:
        return self.ended and self.inner.poll() == RETIRED

    def has_exited(self) -> bool:
        return self.inner.poll() is not None

    def kill(self) -> None:
        """Kill the process and its group, in which children may live on after it has ended by itself. Idempotent."""
        if self.channel.fileno() < 0:  # killed before: by now the id of the group may be another's
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.inner.pid, signal.SIGKILL)
        reap(self.inner)
        self.channel.close()


def describe_exit(returncode: int) -> str:
    """How a process ended, for an error sentence. `returncode`: as `subprocess` has it, -N after signal N."""
    if returncode == -signal.SIGALRM:
        return "its time limit was exceeded"
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
