"""Runners of agent programs: a Python function in a shared host process, or a command as one process per session.

Neither can block the gateway. Outcomes go to a `ProgramObserver`; a program that does not end in time is killed
together with every process it has started."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

from april.agents.host import CancelProgram, ProgramEnded, StartProgram
from april.util.lifetime import SUPERVISED, end_marked, end_with_parent, new_mark
from april.util.pool import LENGTH_BYTES, STDERR, frame
from april.util.registry import python_command, python_environment

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time between cancelling a program and killing its process (s)."""
HEARTBEAT_TIMEOUT_S = 30.0
"""Time without a heartbeat after which a host process counts as blocked, and is killed (s)."""
START_TIMEOUT_S = 120.0
"""Time limit for the start of a host process, import of the program included (s); a slower one counts as failed."""
CHANNEL_CLOSED = (asyncio.IncompleteReadError, ConnectionError)
"""Exceptions that reading from a host process raises once the process has ended."""


class NotStarted(Exception):
    """The process that runs the programs does not become ready; the text says why."""


class ProgramObserver(Protocol):
    """Receives the outcomes of programs; `key` is the session's lease id."""

    def program_started(self, key: int) -> None:
        """The session's program is running: its timeout starts."""

    def program_ended(
        self, key: int, reward: float | None, error: str, state: bytes = b"", details: dict[str, float] | None = None
    ) -> None:
        """The session's program has ended. `reward`: None if it gave none; `error`: why it has failed, "" if it has
        not; `state`: MessagePack of its final state; `details`: named numbers that it gave with its reward."""

    def process_died(self, keys: list[int], why: str) -> None:
        """The process that ran the programs of these sessions has died before they ended."""

    def runner_failed(self, why: str) -> None:
        """The runner cannot run programs any more, for the reason `why`."""


class Runner(Protocol):
    async def start(self) -> None:
        """Prepare for programs. Raises NotStarted."""

    def start_program(self, order: StartProgram) -> None:
        """Run the program for a session."""

    def cancel(self, key: int) -> None:
        """Stop the program of the session with this lease id; the observer is not called for it any more."""

    async def close(self) -> None: ...


class ProgramRunner:
    """Runs a function, or an instance of a class, in a host process, which is replaced when it dies or blocks. Orders
    that come meanwhile wait for the new process."""

    def __init__(self, program: str, options: dict[str, Any], threads: int, observer: ProgramObserver):
        self.program, self.options, self.threads, self.observer = program, options, threads, observer
        self.running: set[int] = set()
        self.cancelling: dict[int, asyncio.TimerHandle] = {}
        self.waiting: dict[int, StartProgram] = {}
        """By the session's lease id, the programs to start in the next host process, while there is no process."""
        self.mark = new_mark()
        self.process: asyncio.subprocess.Process | None = None
        self._orders: asyncio.StreamWriter | None = None
        """Stream of orders to the host process; None while no host process is ready."""
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the host process, and the programs that wait for it. Raises NotStarted."""
        try:
            process, outcomes, orders = await self._start_host()
        except TimeoutError:
            raise NotStarted(f"it was not ready after {START_TIMEOUT_S:g} s") from None
        except CHANNEL_CLOSED:
            raise NotStarted("it ended at its start") from None
        except OSError as error:
            raise NotStarted(f"it cannot be started: {error.strerror}") from error
        self._orders = orders
        self._reading = asyncio.create_task(self._read(process, outcomes))
        self._reading.add_done_callback(self._reading_ended)
        waiting, self.waiting = self.waiting, {}
        for order in waiting.values():
            self._begin(orders, order)

    async def _start_host(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        """The host process once it is ready, with the streams of its outcomes and orders. Raises OSError, such as
        TimeoutError, or asyncio.IncompleteReadError."""
        near, far = socket.socketpair()
        with far:
            self.process = process = await asyncio.create_subprocess_exec(
                *python_command("-m", "april.agents.host", self.program, str(self.threads)),
                stdin=far.fileno(), stdout=STDERR, start_new_session=True,
                env=python_environment() | self.mark | {SUPERVISED: str(os.getpid())},
            )  # fmt: skip
        outcomes, orders = await asyncio.open_connection(sock=near)
        orders.write(frame(self.options))
        await asyncio.wait_for(outcomes.readexactly(LENGTH_BYTES), START_TIMEOUT_S)
        return process, outcomes, orders

    def start_program(self, order: StartProgram) -> None:
        if self._orders:
            self._begin(self._orders, order)
        else:
            self.waiting[order.key] = order
        self.observer.program_started(order.key)

    def _begin(self, orders: asyncio.StreamWriter, order: StartProgram) -> None:
        self.running.add(order.key)
        orders.write(frame(order))

    def cancel(self, key: int) -> None:
        self.waiting.pop(key, None)
        if self._orders and key in self.running and key not in self.cancelling:
            self._orders.write(frame(CancelProgram(key)))
            self.cancelling[key] = asyncio.get_running_loop().call_later(GRACE_S, self._kill)

    async def _read(self, process: asyncio.subprocess.Process, outcomes: asyncio.StreamReader) -> None:
        why = "its process ended"
        try:
            while True:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    size = int.from_bytes(await outcomes.readexactly(LENGTH_BYTES), "little")
                    ended = msgspec.msgpack.decode(await outcomes.readexactly(size), type=ProgramEnded)
                if ended.key:
                    self._handle_ended(ended)
        except TimeoutError:
            why = f"it blocked its process for {HEARTBEAT_TIMEOUT_S:g} s"
        except CHANNEL_CLOSED:
            pass
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = f"its process sent what is no outcome ({error})"
        if not self._closed:
            await self._replace(process, why)

    def _reading_ended(self, task: asyncio.Task[None]) -> None:
        if error := error_of(task):
            self.observer.runner_failed(f"its outcomes cannot be read any more ({error})")

    def _handle_ended(self, ended: ProgramEnded) -> None:
        self.running.discard(ended.key)
        if timer := self.cancelling.pop(ended.key, None):
            timer.cancel()
        else:
            self.observer.program_ended(ended.key, ended.reward, ended.error, ended.state, ended.details)

    async def _replace(self, process: asyncio.subprocess.Process, why: str) -> None:
        if self._orders:
            self._orders.close()
        for timer in self.cancelling.values():
            timer.cancel()
        lost = sorted(self.running - set(self.cancelling))
        self._orders, self.running, self.cancelling = None, set(), {}
        self._kill()
        status = await process.wait()
        await asyncio.to_thread(end_marked, self.mark)
        try:
            await self.start()
        except NotStarted as error:
            return self.observer.runner_failed(f"{why} (status {status}), and did not start again: {error}")
        self.observer.process_died(lost, f"{why} (status {status})")

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
        if self._orders:
            self._orders.close()


class CommandRunner:
    """Runs a command as one process per session, which finds URLs, key and task in its environment variables."""

    def __init__(self, command: Sequence[str], log: Path, observer: ProgramObserver):
        """`command`: words of the command. `log`: file for the output of the processes."""
        self.command, self.observer = list(command), observer
        self.log = log
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.active: set[int] = set()
        """Lease ids of the sessions whose process is running or being started."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotStarted(f"the folder of {self.log} cannot be made: {error.strerror}") from error

    def start_program(self, order: StartProgram) -> None:
        self.active.add(order.key)
        task = asyncio.create_task(self._run(order))
        self.observer.program_started(order.key)
        self.tasks.add(task)
        task.add_done_callback(partial(self._ended, order.key))

    def _ended(self, key: int, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if error := error_of(task):
            self.cancel(key)
            self.observer.program_ended(key, None, f"its process cannot be run: {error}")

    async def _run(self, order: StartProgram) -> None:
        root, mark = order.base_url.removesuffix("/v1"), new_mark()
        variables = {
            "OPENAI_BASE_URL": order.base_url, "OPENAI_API_KEY": order.api_key, "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": order.api_key, "APRIL_TASK": orjson.dumps(order.task).decode(),
            "APRIL_REPLAYING": str(int(order.replaying)), "APRIL_PUBLIC_URL": order.public_url,
        }  # fmt: skip
        with self.log.open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command, env=os.environ | variables | mark, stdin=asyncio.subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True, preexec_fn=end_with_parent,
                )  # fmt: skip
            except OSError as error:
                failure = f"{self.command[0]!r} cannot be started: {error.strerror}"
                return self.observer.program_ended(order.key, None, failure)
        self.processes[order.key] = process
        if order.key not in self.active:
            self.cancel(order.key)
        status = await process.wait()
        kill_group(process.pid)
        await asyncio.to_thread(end_marked, mark)
        if self.processes.get(order.key) is process:
            self.cancel(order.key)
            failure = "" if status == 0 else f"its process ended with status {status}; {self.log} has what it wrote"
            self.observer.program_ended(order.key, None, failure)

    def cancel(self, key: int) -> None:
        self.active.discard(key)
        if process := self.processes.pop(key, None):
            kill_group(process.pid)

    async def close(self) -> None:
        for key in list(self.active):
            self.cancel(key)
        await asyncio.gather(*self.tasks, return_exceptions=True)


def error_of(task: asyncio.Task[None]) -> BaseException | None:
    """The exception that has ended an asyncio task, after logging it; None if none has."""
    error = None if task.cancelled() else task.exception()
    if error:
        log.error("a task of the programs has failed", exc_info=error)
    return error


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
