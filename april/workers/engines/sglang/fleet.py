"""Several SGLang servers as one engine: a request goes to the emptiest one, and a dead one costs its own requests.

Each server is an engine of its own, and its weights come through a lane of its own. A request is placed only on a
server with the newest weights that any of them has held, so that what is leased under a version never runs under an
older one; where none has them, requests wait. What runs on a server that lags behind goes on there.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from april.wire.version import Version
from april.workers.engines.base import Chunk, EngineError, Request
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.news import News

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class SGLangFleet:
    """Implements `Engine` on engines that share one event loop, which is closed with them, and what they wait for."""

    def __init__(self, parts: Sequence[SGLangEngine], loop: asyncio.AbstractEventLoop, news: News):
        self.parts = list(parts)
        self._going = list(parts)
        """without those that can never go on"""
        self._loop, self._news = loop, news
        self._newest_step = 0
        self._waiting: dict[int, Request] = {}
        self._failures: list[tuple[int, str]] = []

    # --- what it has ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The newest that any has held; None where none holds it at the moment."""
        held = [part.version for part in self._serving() if part.version is not None]
        return max(held, key=lambda version: (version.step, version.branch), default=None)

    def _serving(self) -> list[SGLangEngine]:
        loaded = [(part, part.version) for part in self._going if part.version is not None]
        self._newest_step = max([self._newest_step, *(version.step for _, version in loaded)])
        return [part for part, version in loaded if version.step == self._newest_step]

    @property
    def ready(self) -> bool:
        return any(part.ready for part in self._going)

    @property
    def max_context(self) -> int:
        return min(part.max_context for part in self.parts)

    @property
    def generated_tokens(self) -> int:
        return sum(part.generated_tokens for part in self.parts)

    @property
    def live(self) -> int:
        return len(self._waiting) + sum(part.live for part in self.parts)

    @property
    def queued(self) -> int:
        return len(self._waiting) + sum(part.queued for part in self.parts)

    @property
    def capacity(self) -> int:
        """A server that lags behind takes no more than it has."""
        serving = self._serving()
        return sum(part.capacity if part in serving else part.live for part in self._going)

    @property
    def kv_tokens(self) -> int | None:
        each = [part.kv_tokens for part in self.parts]
        known = [tokens for tokens in each if tokens is not None]
        return sum(known) if len(known) == len(each) else None

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting or any(request_id in part for part in self.parts)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        for part in self.parts:
            part.check(request, self)
        self._waiting[request.id] = request
        self._place()

    def _place(self) -> None:
        while self._waiting and (serving := self._serving()):
            request = self._waiting.pop(next(iter(self._waiting)))
            try:
                min(serving, key=load).submit(request)
            except EngineError as error:
                self._failures.append((request.id, str(error)))

    def step(self) -> list[Chunk]:
        """Waits for all servers at once, however many they are."""
        self._place()
        self._loop.run_until_complete(self._news.come(expected=any(part.busy for part in self._going)))
        return list(chain.from_iterable(self._collect(part) for part in list(self._going)))

    def _collect(self, part: SGLangEngine) -> list[Chunk]:
        try:
            return part.collect()
        except EngineError as error:
            self._going.remove(part)
            self._failures += part.failures()
            if not self._going:
                raise
            log.error("%d of %d servers go on: %s", len(self._going), len(self.parts), error)
            return []

    def failures(self) -> list[tuple[int, str]]:
        failures, self._failures = self._failures, []
        return failures + [failure for part in self._going for failure in part.failures()]

    def cancel(self, request_id: int) -> list[Chunk]:
        return self.cancel_all([request_id])

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        ids = set(request_ids)
        for key in ids & self._waiting.keys():
            del self._waiting[key]
        return self._loop.run_until_complete(self._end_all(ids))

    async def _end_all(self, ids: set[int]) -> list[Chunk]:
        """On all servers at once, so that a hung one holds nobody up for longer than it takes."""
        return list(chain.from_iterable(await asyncio.gather(*(part.end_all(ids) for part in self._going))))

    # --- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        """One server after the other, the others generating meanwhile."""
        for part in self._going:
            part.load_weights(version, tensors)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Of one that has the newest weights."""
        if not (serving := self._serving()):
            raise EngineError("there are no weights to score with; load some")
        return serving[0].score(tokens)

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def disown(self) -> None:
        for part in self._going:
            part.disown()

    def release(self) -> None:
        self._loop.run_until_complete(self._each(part.let_go() for part in self._going))

    def resume(self) -> None:
        self._loop.run_until_complete(self._each(part.take_again() for part in self._going))

    async def _each(self, calls: Iterable[Coroutine]) -> None:
        await asyncio.gather(*calls)

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self._loop.close()


def load(part: SGLangEngine) -> float:
    """Requests for each that it has room for; its room follows the server's slots and KV memory."""
    return part.live / max(part.capacity, 1)
