"""The same run for a trainer that is an asyncio program: the calls of `Rollouts`, awaited.

async with april.rollouts.aio.connect("my-run.toml", checkpoint=T) as run:
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
from april.rollouts import run as synchronous
from april.rollouts.batch import RolloutBatch
from april.rollouts.prompts import Prompt, PromptText
from april.rollouts.run import Rollouts
from april.rollouts.weights import Score, Weights
from april.wire.training import Discard

Answer = TypeVar("Answer")


class AsyncRollouts:
    """Calls run one after the other, in a thread of their own. One that is cancelled goes on there; leaving the block
    does not wait for it. The thread outlives a local run: Linux kills a child with the thread that has started it."""

    def __init__(self, opening: Callable[[], Rollouts]):
        self._opening = opening
        self._thread = ThreadPoolExecutor(1, "rollouts")

    async def __aenter__(self) -> "AsyncRollouts":
        self.run = await self._call(self._opening)
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
        """A copy of the weights is on its way when it returns; until then leave them as they are."""
        return await self._call(partial(self.run.publish, weights))

    @asynccontextmanager
    async def updating(self, score: Score | None = None) -> AsyncIterator[bool]:
        """`score` is called in the thread of the calls."""
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

    async def _call(self, what: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, what)


def connect(*arguments: Any, **keys: Any) -> AsyncRollouts:
    """As `april.connect`; it connects when the block is entered."""
    return AsyncRollouts(partial(synchronous.connect, *arguments, **keys))
