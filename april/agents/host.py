"""The process that runs the user's agent program for many sessions at once: `python -m april.agents.host PROGRAM
THREADS`.

The program's options and then orders come over the channel that is its stdin, and outcomes go back over it. A coroutine
function runs in the event loop, a plain function in a thread."""

import asyncio
import inspect
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from april.agents import PROGRAMS
from april.util.lifetime import die_with_parent, exit_at_once
from april.util.logs import user_traceback
from april.util.pool import LENGTH_BYTES, READY, frame, private_channel, read_rules
from april.wire.limits import MAX_AGENT_STATE_BYTES, MAX_REWARD, is_reward, reward_details

HEARTBEAT_S = 1.0
ERROR_CHARACTERS = 2000


class StartProgram(msgspec.Struct, tag=True, array_like=True):
    """Order to run the program for a session; `key` is the session's lease id."""

    key: int
    base_url: str
    api_key: str
    task: dict[str, Any]
    replaying: bool
    public_url: str
    """Base URL of the API for clients on other machines."""


class CancelProgram(msgspec.Struct, tag=True, array_like=True):
    """Order to cancel the program of a session."""

    key: int


class ProgramEnded(msgspec.Struct, array_like=True):
    """Outcome of a session's program. `key`: that of its `StartProgram`, the session's lease id; 0: no outcome, but a
    heartbeat of the host process."""

    key: int
    reward: float | None = None
    error: str = ""
    state: bytes = b""
    """MessagePack of the program's `session.state`; b"" without one."""
    details: dict[str, float] = {}
    """Named numbers that the program gives with its reward, such as `correct`."""


@dataclass
class HostedSession:
    """The argument of an agent program: where to call the policy, and the task."""

    base_url: str
    """Base URL of the API, with /v1; `root_url` is the same without it, for Anthropic's SDK."""
    api_key: str
    task: dict[str, Any]
    """`messages` and `label` of the row; `group`, `index` and `evaluation` of the sample."""
    replaying: bool
    """Whether this is a repeated execution of the program, whose first calls are answered from the journal."""
    public_url: str = ""
    """Base URL of the same API for containers and other machines."""
    state: Any = None
    """Final state that the program passes to the verifier: any value that MessagePack can encode."""

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def openai_client(self, http: Any) -> Any:
        """An `openai.AsyncOpenAI` for the policy. `http`: one `openai.DefaultAsyncHttpxClient(timeout=None)` for all
        sessions, because creating one takes longer than a turn."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http, timeout=None)


def load_program(name: str, options: dict[str, Any]) -> Any:
    """The agent program called `name`, as the configuration names it. A class is instantiated with `options`; if that
    raises, the result is a program that raises the same error in every session."""
    program = PROGRAMS.find(name)
    if not inspect.isclass(program):
        return program
    try:
        return program(**options)
    except Exception as error:
        return partial(raise_error, error)


def raise_error(error: Exception, session: HostedSession) -> None:
    raise error


class Host:
    def __init__(self, program: Any, threads: int):
        self.program = program
        self.is_async = any(map(inspect.iscoroutinefunction, (program, type(program).__call__)))
        self.outgoing: asyncio.StreamWriter
        """The channel to the parent process; buffers what the parent has not read yet."""
        self.running: dict[int, asyncio.Task[None]] = {}
        self.threads = ThreadPoolExecutor(threads)

    async def serve(self, incoming: int) -> None:
        reader, self.outgoing = await asyncio.open_connection(sock=socket.socket(fileno=incoming))
        self.outgoing.write(READY)
        heartbeat = asyncio.create_task(self._heartbeat())
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                self._handle(msgspec.msgpack.decode(await reader.readexactly(size), type=StartProgram | CancelProgram))
        except (asyncio.IncompleteReadError, ConnectionError):
            heartbeat.cancel()

    def _handle(self, order: StartProgram | CancelProgram) -> None:
        if isinstance(order, StartProgram):
            self.running[order.key] = asyncio.create_task(self._run(order))
        elif self.is_async and (task := self.running.get(order.key)):
            task.cancel()  # a thread cannot be cancelled: if it does not end in time, the process is killed

    async def _run(self, order: StartProgram) -> None:
        session = HostedSession(order.base_url, order.api_key, order.task, order.replaying, order.public_url)
        try:
            if self.is_async:
                reward = await self.program(session)
            else:
                reward = await asyncio.get_running_loop().run_in_executor(self.threads, self.program, session)
            ended = self._outcome(order.key, reward, pack_state(session.state))
        except asyncio.CancelledError:
            ended = ProgramEnded(order.key, error="it was cancelled")
        except BaseException as error:
            ended = ProgramEnded(order.key, error=error_text(error))
        self.running.pop(order.key, None)
        self.outgoing.write(frame(ended))

    def _outcome(self, key: int, result: Any, state: bytes) -> ProgramEnded:
        reward, given = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        is_number = isinstance(reward, int | float) or hasattr(reward, "__float__")
        if reward is None or (is_number and is_reward(float(reward))):
            try:
                details = reward_details(given)
            except ValueError as error:
                return ProgramEnded(key, error=f"what it returned with its reward: {error}")
            return ProgramEnded(key, None if reward is None else float(reward), state=state, details=details)
        return ProgramEnded(
            key, error=f"it returned {reward!r}, which is neither a finite number up to {MAX_REWARD:g} nor None"
        )

    async def _heartbeat(self) -> None:
        while True:
            self.outgoing.write(frame(ProgramEnded(0)))
            await asyncio.sleep(HEARTBEAT_S)


def pack_state(state: Any) -> bytes:
    """MessagePack of a session's state. Raises ValueError if it is too large, TypeError if it cannot be encoded."""
    data = b"" if state is None else msgspec.msgpack.encode(state)
    if len(data) > MAX_AGENT_STATE_BYTES:
        raise ValueError(f"the state that is left has {len(data)} bytes, and {MAX_AGENT_STATE_BYTES} is the most")
    return data


def error_text(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    return f"{said[:ERROR_CHARACTERS]}\n{user_traceback(error)[-ERROR_CHARACTERS:]}"


def main() -> None:
    die_with_parent()
    name, threads = sys.argv[1], int(sys.argv[2])
    incoming, _ = private_channel()
    options = read_rules(incoming, dict[str, Any])
    asyncio.run(Host(load_program(name, options), threads).serve(incoming))
    exit_at_once(0)


if __name__ == "__main__":
    main()
