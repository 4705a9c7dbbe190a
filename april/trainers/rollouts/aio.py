"""The asyncio form of `april.connect`: the methods of `Rollouts` as coroutines.

async with april.trainers.rollouts.aio.connect("my-run.toml", checkpoint=T) as run:
    await run.publish(model)
    async for batch in run.batches():
        ...
        await run.consumed(batch, {"loss": loss})
        await run.publish(model)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from april.config import Config
from april.trainers.rollouts import run as synchronous
from april.trainers.rollouts.batch import RolloutBatch
from april.trainers.rollouts.prompts import Prompt, PromptText
from april.trainers.rollouts.run import Rollouts
from april.trainers.rollouts.weights import Score, Weights
from april.wire.training import Discard

Result = TypeVar("Result")


class AsyncRollouts:
    """`Rollouts` with coroutines, which run one after another in one thread.

    A cancelled call continues in that thread, and leaving the block does not wait for it. The thread outlives a local
    run, because Linux kills a child process together with the thread that started it.
    """

    def __init__(self, connect: Callable[[], Rollouts]):
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, "rollouts")

    async def __aenter__(self) -> "AsyncRollouts":
        self.run = await self._call(self._connect)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        try:
            await asyncio.to_thread(self.run.__exit__, kind, error, trace)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def step(self) -> int:
        return self.run.step

    @property
    def submitted(self) -> int:
        return self.run.submitted

    async def batches(self) -> AsyncIterator[RolloutBatch]:
        while (batch := await self.take()) is not None:
            yield batch

    async def take(self) -> RolloutBatch | None:
        return await self._call(self.run.take)

    async def submit(self, prompts: Iterable[Prompt | PromptText], first: int | None = None) -> int:
        return await self._call(partial(self.run.submit, prompts, first))

    async def consumed(
        self, batch: RolloutBatch, metrics: Mapping[str, float] | None = None, discarded: Discard = ""
    ) -> None:
        await self._call(partial(self.run.consumed, batch, metrics, discarded))

    async def publish(self, weights: Weights) -> dict[str, float]:
        """Start sending the current weights to the workers, after the previous ones have arrived; returns figures about
        the previous transfer. `weights`: as for `Rollouts.publish`. Do not change them before this call returns: by
        then they are copied."""
        return await self._call(partial(self.run.publish, weights))

    @asynccontextmanager
    async def updating(self, score: Score | None = None) -> AsyncIterator[bool]:
        """An `async with` block in which the trainer loads the weights of its current step into the inference servers
        (`weights.transport` = "external"). Yields whether the servers need them; not while batches are repeated after a
        restart. `score`: the trainer's log-probabilities of the canary, called in the one thread that makes all calls
        of this object; None: the loaded weights are not verified."""
        block = self.run.updating(score)
        due = await self._call(block.__enter__)
        try:
            yield due
        except BaseException as error:
            await self._call(partial(block.__exit__, type(error), error, error.__traceback__))
            raise
        await self._call(partial(block.__exit__, None, None, None))

    async def version(self, step: int, score: Score | None = None) -> None:
        await self._call(partial(self.run.version, step, score))

    async def durable(self, batch: RolloutBatch | int, oldest: int | None = None) -> None:
        await self._call(partial(self.run.durable, batch, oldest))

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def connect(*arguments: Any, **keys: Any) -> AsyncRollouts:
    """The asyncio form of `april.connect`, with the same parameters, for `async with connect(...) as run:`. The
    connection is made, and errors are raised, when the block is entered."""
    return AsyncRollouts(partial(synchronous.connect, *arguments, **keys))
