"""Verifiers at work in processes of their own, so that none can hang, crash or block the worker that asks.

    pool = RewardPool(processes=2, rules=RewardRules(timeout_s=10.0))
    pool.submit(key, "final_answer", response, label, "stop")
    ...
    for score in pool.poll():              # never waits
        score.key, score.reward, score.error, score.details

What `submit_group` takes is scored by one call and comes back as a `GroupScore`, or as a `Score` with an error.
Every submitted item comes back exactly once, with a reward or with an error. A process that exceeds the
time limit is killed, one that has died is replaced; only the item it was at is charged with it.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from typing import Generic, TypeVar

import msgspec

from april.workers.rewards.messages import LENGTH_BYTES, GroupItem, GroupScore, Item, RewardRules, Score, frame
from april.workers.rewards.process import BATCH_ITEMS
from april.workers.rewards.verifiers import IN_BATCHES

IN_FLIGHT_ITEMS = 4
"""Handed to a process at a time: one at work, the others so that it need not wait for the next poll."""
START_LIMIT_S = 60.0
ORPHAN_MARGIN_S = 5.0
"""A process ends itself this long after the time limit, in case its pool is no longer there to do it."""

ItemT, AnswerT = TypeVar("ItemT"), TypeVar("AnswerT")
"""what processes are given and what they answer; both have a `key`"""


class ProcessPool(Generic[ItemT, AnswerT]):
    def __init__(self, processes: int):
        self.queue: deque[ItemT] = deque()
        self.processes = [self.start_process() for _ in range(processes)]

    def start_process(self) -> "PoolProcess":
        raise NotImplementedError

    def charge(self, item: ItemT, failure: str) -> AnswerT:
        """The answer to an item that its process has failed at."""
        raise NotImplementedError

    def room(self, item: ItemT) -> int:
        """Items that a process which gets this one may have in flight."""
        return IN_FLIGHT_ITEMS

    @property
    def pending(self) -> int:
        """Items submitted and not yet returned by `poll`."""
        return len(self.queue) + sum(len(process.in_flight) for process in self.processes)

    def poll(self) -> list[AnswerT]:
        """Answers that have arrived since the last call."""
        if not self.pending:
            return []
        answers = []
        for index, process in enumerate(self.processes):
            answers += process.receive()
            if failure := process.failure():
                answers += self.replace(index, failure)
            else:
                process.flush()
        self.dispatch()
        return answers

    def dispatch(self) -> None:
        """Hand queued items to the processes that have the fewest."""
        while self.queue:
            index = min(range(len(self.processes)), key=lambda i: len(self.processes[i].in_flight))
            if len(self.processes[index].in_flight) >= self.room(self.queue[0]):
                return
            if not self.processes[index].in_flight and self.processes[index].has_exited():
                self.replace(index, "")
            self.processes[index].send(self.queue.popleft())

    def replace(self, index: int, failure: str) -> list[AnswerT]:
        """A new process in the place of a failed one: its first item is charged, the others wait again."""
        failed = self.processes[index]
        failed.kill()
        charged = [self.charge(item, failure) for item in failed.head()]
        self.queue.extendleft(reversed(list(failed.in_flight)[1:]))
        self.processes[index] = self.start_process()
        return charged

    def close(self) -> None:
        """Ends all processes; what is pending is lost."""
        for process in self.processes:
            process.kill()


class RewardPool(ProcessPool[Item | GroupItem, Score | GroupScore]):
    def __init__(self, processes: int, rules: RewardRules):
        self.rules = rules
        super().__init__(processes)

    def submit(
        self,
        key: int,
        verifier: str,
        response: str,
        label: str,
        finish_reason: str,
        prompt: str = "",
        tokens: int = 0,
        state: bytes = b"",
    ) -> None:
        """`tokens`: of the response; `state`: of its environment at the end."""
        self.queue.append(Item(key, verifier, response, label, finish_reason, prompt, tokens, state))
        self.dispatch()

    def submit_group(self, key: int, verifier: str, items: list[Item]) -> None:
        self.queue.append(GroupItem(key, verifier, items))
        self.dispatch()

    def start_process(self) -> "PoolProcess":
        return PoolProcess("april.workers.rewards.process", self.rules, self.rules.timeout_s, Score | GroupScore)

    def charge(self, item: Item | GroupItem, failure: str) -> Score:
        return Score(item.key, None, f"verifier {item.verifier!r}: {failure}")

    def room(self, item: Item | GroupItem) -> int:
        return BATCH_ITEMS if item.verifier in IN_BATCHES else super().room(item)


class PoolProcess:
    """One operating-system process and the items it has been given, answered in order.

    `module` is run with its time limit and the `rules`; what it answers is of the type `answer`.
    """

    def __init__(self, module: str, rules: msgspec.Struct, timeout_s: float, answer: type):
        self.timeout_s, self._decoder = timeout_s, msgspec.msgpack.Decoder(answer)
        limit, encoded = str(timeout_s + ORPHAN_MARGIN_S), msgspec.json.encode(rules).decode()
        self.inner = subprocess.Popen(
            [sys.executable, "-m", module, limit, encoded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        os.set_blocking(self.inner.stdin.fileno(), False)
        os.set_blocking(self.inner.stdout.fileno(), False)
        self.in_flight: deque = deque()
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

    def flush(self) -> None:
        """Write what the pipe takes."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.inner.stdin.fileno(), self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()

    def receive(self) -> list:
        """Answers that lie in the pipe."""
        try:
            while data := os.read(self.inner.stdout.fileno(), 65536):
                self.unread += data
            self.ended = True
        except BlockingIOError:
            pass
        return list(self.parse())

    def parse(self):
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

    def failure(self) -> str | None:
        """Why this process cannot go on, if so."""
        if self.ended and self.has_exited():
            return f"its process ended ({ending(self.inner.returncode)})"
        limit_s = self.timeout_s if self.ready else START_LIMIT_S
        if self.in_flight and time.monotonic() - self.busy_since_s > limit_s:
            return f"{'no answer' if self.ready else 'no start'} within {limit_s:g} s"
        return None

    def head(self) -> list:
        return list(self.in_flight)[:1]

    def has_exited(self) -> bool:
        return self.inner.poll() is not None

    def kill(self) -> None:
        """Ends the process and all it has started."""
        if self.inner.returncode is None:
            os.killpg(self.inner.pid, signal.SIGKILL)
            self.inner.wait()
        self.inner.stdin.close()
        self.inner.stdout.close()


def ending(returncode: int) -> str:
    if returncode == -signal.SIGALRM:
        return "its time limit was exceeded"
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
