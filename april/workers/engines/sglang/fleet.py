"""Several SGLang servers as one engine: a request goes to the least loaded one, and a dead one loses only its requests.

Each server has its own engine and its own weight channel. A request is dispatched only to a server with the newest
weights that any has held, so that a sample leased under a version never runs under an older one; if none has them,
requests wait. Requests already running on a server that lags behind continue there.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from april.wire.message import Version
from april.workers.engines.base import Chunk, EngineError, Request
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.run import StepSignal

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class SGLangFleet:
    """Implements `Engine` on several servers, each with an engine of its own. The engines share one step signal, and
    one event loop, which this class closes."""

    def __init__(self, engines: Sequence[SGLangEngine], loop: asyncio.AbstractEventLoop, step_signal: StepSignal):
        self.engines = list(engines)
        self._alive = list(engines)
        """Engines of all servers that have not failed for good."""
        self._loop, self._step_signal = loop, step_signal
        self._newest_step = 0
        self._waiting: dict[int, Request] = {}
        self._failures: list[tuple[int, str]] = []

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The newest policy version that any server has held; None if no server holds that version at the moment."""
        held = [engine.version for engine in self._current() if engine.version is not None]
        return max(held, key=lambda version: (version.step, version.incarnation), default=None)

    def _current(self) -> list[SGLangEngine]:
        loaded = [(engine, engine.version) for engine in self._alive if engine.version is not None]
        self._newest_step = max([self._newest_step, *(version.step for _, version in loaded)])
        return [engine for engine, version in loaded if version.step == self._newest_step]

    @property
    def ready(self) -> bool:
        return any(engine.ready for engine in self._alive)

    @property
    def max_context(self) -> int:
        return min(engine.max_context for engine in self.engines)

    @property
    def generated_tokens(self) -> int:
        return sum(engine.generated_tokens for engine in self.engines)

    @property
    def live(self) -> int:
        return len(self._waiting) + sum(engine.live for engine in self.engines)

    @property
    def queued(self) -> int:
        return len(self._waiting) + sum(engine.queued for engine in self.engines)

    @property
    def capacity(self) -> int:
        """Sum of the servers' capacities. A server whose weights are not the newest counts only with the requests that
        it has, since it gets no new ones."""
        current = self._current()
        return sum(engine.capacity if engine in current else engine.live for engine in self._alive)

    @property
    def kv_tokens(self) -> int | None:
        each = [engine.kv_tokens for engine in self.engines]
        known = [tokens for tokens in each if tokens is not None]
        return sum(known) if len(known) == len(each) else None

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting or any(request_id in engine for engine in self.engines)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        for engine in self.engines:
            engine.check(request, self)
        self._waiting[request.id] = request
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and (current := self._current()):
            request = self._waiting.pop(next(iter(self._waiting)))
            try:
                min(current, key=load).submit(request)
            except EngineError as error:
                self._failures.append((request.id, str(error)))

    def step(self) -> list[Chunk]:
        """New tokens of all servers' requests, as `Engine.step` returns them. Waits until any server has sent some, or
        a short time if none does; a server that has failed for good is dropped."""
        self._dispatch()
        self._loop.run_until_complete(
            self._step_signal.wait_for_work(expected=any(engine.busy for engine in self._alive))
        )
        return list(chain.from_iterable(self._collect(engine) for engine in list(self._alive)))

    def _collect(self, engine: SGLangEngine) -> list[Chunk]:
        try:
            return engine.collect()
        except EngineError as error:
            self._alive.remove(engine)
            self._failures += engine.failures()
            if not self._alive:
                raise
            log.error("%d of %d servers go on: %s", len(self._alive), len(self.engines), error)
            return []

    def failures(self) -> list[tuple[int, str]]:
        failures, self._failures = self._failures, []
        return failures + [failure for engine in self._alive for failure in engine.failures()]

    def cancel(self, request_id: int) -> list[Chunk]:
        return self.cancel_all([request_id])

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        ids = set(request_ids)
        for key in ids & self._waiting.keys():
            del self._waiting[key]
        return self._loop.run_until_complete(self._abort_requests(ids))

    async def _abort_requests(self, ids: set[int]) -> list[Chunk]:
        """Abort the requests with these ids on all servers concurrently, so that a hung server does not delay the
        others."""
        return list(chain.from_iterable(await asyncio.gather(*(engine.abort_requests(ids) for engine in self._alive))))

    # --- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        """As `Engine.load_weights`, one server after the other; the others generate meanwhile."""
        for engine in self._alive:
            engine.load_weights(version, tensors)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities, float32 [T - 1], of `tokens[1:]` (int32 [T]), each given the tokens before it, from a
        server with the newest weights. Raises EngineError, also if no server has them."""
        if not (current := self._current()):
            raise EngineError("there are no weights to score with; load some")
        return current[0].score(tokens)

    @property
    def dtype(self) -> str:
        return self.engines[0].dtype

    def discard_weights(self) -> None:
        for engine in self._alive:
            engine.discard_weights()

    def release(self) -> None:
        self._loop.run_until_complete(self._each(engine.release_async() for engine in self._alive))

    def resume(self) -> None:
        self._loop.run_until_complete(self._each(engine.resume_async() for engine in self._alive))

    async def _each(self, calls: Iterable[Coroutine]) -> None:
        await asyncio.gather(*calls)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self._loop.close()


def load(engine: SGLangEngine) -> float:
    """Requests that run or are queued, as a share of the engine's capacity."""
    return engine.live / max(engine.capacity, 1)
