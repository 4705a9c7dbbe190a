"""The process in which an agent's program runs, many sessions at a time: `python -m april.agents.host
PLACE OPTIONS THREADS`.

It is told over a pipe what to run, and says how each ended. A coroutine runs in the event loop, a plain function in a
thread of its own.
"""

import asyncio
import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import msgspec

from april.agents import PROGRAMS
from april.processes.blame import raised
from april.processes.frames import LENGTH_BYTES, READY, frame, private_pipes, send
from april.processes.lifetime import die_with_parent, end
from april.wire.limits import LEFT_BYTES, REWARD, is_reward

BEAT_S = 1.0
ERROR_CHARACTERS = 2000


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Run the program for a session."""

    key: int
    base_url: str
    api_key: str
    task: dict[str, Any]
    replaying: bool
    public_url: str
    """of the API for others than this machine's"""


class Cease(msgspec.Struct, tag=True, array_like=True):
    key: int


class Ended(msgspec.Struct, array_like=True):
    """How a session's program ended; `key` 0 only says that the process lives."""

    key: int
    reward: float | None = None
    error: str = ""
    state: bytes = b""
    """MessagePack of what the program has left"""


@dataclass
class Session:
    """What a program is given."""

    base_url: str
    """of the API, with /v1; without it, as Anthropic's SDK wants it, `root_url`"""
    api_key: str
    task: dict[str, Any]
    """`messages` and `label` of the row; `group`, `index` and `evaluation` of the sample"""
    replaying: bool
    """it was run before, and what it asks first is answered from the journal"""
    public_url: str = ""
    """of the same API, for what the program starts in containers or on other machines"""
    state: Any = None
    """what the program leaves to a verifier, which may be one of the whole group: anything that MessagePack holds"""

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")


def made(place: str, options: dict[str, Any]) -> Any:
    """The program at that place; one that is a class is made here, of its options. What it raises then, each of its
    sessions raises."""
    program = PROGRAMS.find(place)
    if not inspect.isclass(program):
        return program
    try:
        return program(**options)
    except Exception as error:
        return partial(fail, error)


def fail(error: Exception, session: Session) -> None:
    raise error


class Host:
    def __init__(self, program: Any, outgoing: BinaryIO, threads: int):
        self.program = program
        self.is_async = any(map(inspect.iscoroutinefunction, (program, type(program).__call__)))
        self.outgoing = outgoing
        self.running: dict[int, asyncio.Task[None]] = {}
        self.threads = ThreadPoolExecutor(threads)

    async def serve(self, incoming: int) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb")
        )
        send(self.outgoing, READY)
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                self._take(msgspec.msgpack.decode(await reader.readexactly(size), type=Begin | Cease))
        except asyncio.IncompleteReadError:
            beat.cancel()

    def _take(self, order: Begin | Cease) -> None:
        if isinstance(order, Begin):
            self.running[order.key] = asyncio.create_task(self._run(order))
        elif self.is_async and (task := self.running.get(order.key)):
            task.cancel()  # a thread cannot be: if it does not end by itself, the process is

    async def _run(self, order: Begin) -> None:
        session = Session(order.base_url, order.api_key, order.task, order.replaying, order.public_url)
        try:
            if self.is_async:
                reward = await self.program(session)
            else:
                reward = await asyncio.get_running_loop().run_in_executor(self.threads, self.program, session)
            ended = self._ended(order.key, reward, packed(session.state))
        except asyncio.CancelledError:
            ended = Ended(order.key, error="it was cancelled")
        except BaseException as error:
            ended = Ended(order.key, error=last_lines(error))
        self.running.pop(order.key, None)
        send(self.outgoing, frame(ended))

    def _ended(self, key: int, reward: Any, state: bytes) -> Ended:
        is_number = isinstance(reward, int | float) or hasattr(reward, "__float__")
        if reward is None or (is_number and is_reward(float(reward))):
            return Ended(key, None if reward is None else float(reward), state=state)
        return Ended(key, error=f"it returned {reward!r}, which is neither a finite number up to {REWARD:g} nor None")

    async def _beat(self) -> None:
        while True:
            send(self.outgoing, frame(Ended(0)))
            await asyncio.sleep(BEAT_S)


def packed(state: Any) -> bytes:
    """Raises ValueError and TypeError for what a session cannot leave."""
    data = b"" if state is None else msgspec.msgpack.encode(state)
    if len(data) > LEFT_BYTES:
        raise ValueError(f"the state that is left has {len(data)} bytes, and {LEFT_BYTES} is the most")
    return data


def last_lines(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}\n{raised(error)[-ERROR_CHARACTERS:]}"


def main() -> None:
    die_with_parent()
    place, options, threads = sys.argv[1], msgspec.json.decode(sys.argv[2]), int(sys.argv[3])
    incoming, outgoing = private_pipes()
    asyncio.run(Host(made(place, options), outgoing, threads).serve(incoming))
    end(0)


if __name__ == "__main__":
    main()
