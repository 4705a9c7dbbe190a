"""How agents run: a function of one's own in a host process, or a process for each session.

Neither can hold up the gateway. What ends, and how, is told to an `Audience`; what does not end is killed with all it
has started.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

from april.agents.host import Begin, Cease, Ended
from april.processes.frames import LENGTH_BYTES, frame
from april.processes.lifetime import SUPERVISED, end_with_parent
from april.processes.tree import end_marked, new_mark

GRACE_S = 5.0
"""for a program that is told to end"""
SILENT_S = 30.0
"""a host process that says nothing for so long is blocked"""
START_S = 120.0
"""longest start of a host process: it imports the program"""


class Audience(Protocol):
    def began(self, key: int) -> None:
        """A session's program is under way: its time runs."""

    def ended(self, key: int, reward: float | None, error: str, state: bytes = b"") -> None:
        """A session's program has ended; `state`: MessagePack of what it has left."""

    def died(self, keys: list[int], why: str) -> None:
        """The process of these sessions' programs is gone; none of them has ended."""

    def broken(self, why: str) -> None:
        """No program can be run here any more."""


class Runner(Protocol):
    async def start(self) -> None: ...

    def begin(self, order: Begin) -> None:
        """Run the program for a session."""

    def cease(self, key: int) -> None:
        """Have it end; nothing is said of it any more."""

    async def close(self) -> None: ...


class ProgramRunner:
    """A function, or a class that is made of its options, in a process that is replaced when it dies or is blocked."""

    def __init__(self, place: str, options: dict[str, Any], threads: int, audience: Audience):
        self.place, self.options, self.threads, self.audience = place, options, threads, audience
        self.running: set[int] = set()
        self.ceasing: dict[int, asyncio.TimerHandle] = {}
        self.mark = new_mark()
        self.process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Raises TimeoutError and asyncio.IncompleteReadError for a program that does not come to its start."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "april.agents.host", self.place, orjson.dumps(self.options).decode(),
            str(self.threads), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env=os.environ | self.mark
            | {SUPERVISED: str(os.getpid()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert self.process.stdout
        await asyncio.wait_for(self.process.stdout.readexactly(LENGTH_BYTES), START_S)
        self._reading = asyncio.create_task(self._read(self.process))

    def begin(self, order: Begin) -> None:
        self.running.add(order.key)
        self._send(order)
        self.audience.began(order.key)

    def cease(self, key: int) -> None:
        if key in self.running and key not in self.ceasing:
            self._send(Cease(key))
            self.ceasing[key] = asyncio.get_running_loop().call_later(GRACE_S, self._kill)

    def _send(self, order: Begin | Cease) -> None:
        if self.process and self.process.stdin and not self.process.stdin.is_closing():
            self.process.stdin.write(frame(order))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        why = "its process ended"
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
                    ended = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Ended)
                if ended.key:
                    self._take(ended)
        except TimeoutError:
            why = f"it blocked its process for {SILENT_S:g} s"
        except asyncio.IncompleteReadError:
            pass
        if not self._closed:
            await self._replace(process, why)

    def _take(self, ended: Ended) -> None:
        self.running.discard(ended.key)
        if timer := self.ceasing.pop(ended.key, None):
            timer.cancel()
        else:
            self.audience.ended(ended.key, ended.reward, ended.error, ended.state)

    async def _replace(self, process: asyncio.subprocess.Process, why: str) -> None:
        self._kill()
        status = await process.wait()
        await asyncio.to_thread(end_marked, self.mark)
        for timer in self.ceasing.values():
            timer.cancel()
        gone = sorted(self.running - set(self.ceasing))
        self.running, self.ceasing = set(), {}
        try:
            await self.start()
        except (TimeoutError, asyncio.IncompleteReadError):
            return self.audience.broken(f"{why} (status {status}), and did not start again")
        self.audience.died(gone, f"{why} (status {status})")

    def _kill(self) -> None:
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        self._closed = True
        self._kill()
        if self.process:
            await self.process.wait()
            await asyncio.to_thread(end_marked, self.mark)
        if self._reading:
            self._reading.cancel()


class CommandRunner:
    """A process for each session, told by its environment whom to speak with."""

    def __init__(self, command: Sequence[str], log: Path, audience: Audience):
        """`log`: takes what the processes write."""
        self.command, self.audience = list(command), audience
        self.log = log
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.wanted: set[int] = set()
        """sessions, those included whose process is being started"""
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, order: Begin) -> None:
        self.wanted.add(order.key)
        task = asyncio.create_task(self._run(order))
        self.audience.began(order.key)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, order: Begin) -> None:
        root, mark = order.base_url.removesuffix("/v1"), new_mark()
        told = {
            "OPENAI_BASE_URL": order.base_url, "OPENAI_API_KEY": order.api_key, "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": order.api_key, "APRIL_TASK": orjson.dumps(order.task).decode(),
            "APRIL_REPLAYING": str(int(order.replaying)), "APRIL_PUBLIC_URL": order.public_url,
        }  # fmt: skip
        with self.log.open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command, env=os.environ | told | mark, stdin=asyncio.subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True, preexec_fn=end_with_parent,
                )  # fmt: skip
            except OSError as error:
                return self.audience.ended(order.key, None, f"{self.command[0]!r} cannot be started: {error.strerror}")
        self.processes[order.key] = process
        if order.key not in self.wanted:
            self.cease(order.key)
        status = await process.wait()
        kill_group(process.pid)
        await asyncio.to_thread(end_marked, mark)
        if self.processes.get(order.key) is process:
            self.cease(order.key)
            said = "" if status == 0 else f"its process ended with status {status}; {self.log} has what it wrote"
            self.audience.ended(order.key, None, said)

    def cease(self, key: int) -> None:
        self.wanted.discard(key)
        if process := self.processes.pop(key, None):
            kill_group(process.pid)

    async def close(self) -> None:
        for key in list(self.wanted):
            self.cease(key)
        await asyncio.gather(*self.tasks, return_exceptions=True)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
