"""Base class for custom engines: it manages requests, chunks and cancels; a subclass samples the next token.

    class Engine(InProcessEngine):
        def set_weights(self, tensors): ...
        def sample(self, running): return token, logprob

Queued requests wait for one of the slots, first come first served. All tokens are computed in `step`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from april.config import Config, ConfigError
from april.util import clock
from april.wire.message import Version
from april.workers.engines.base import Chunk, EngineError, Finish, Request, Ticks
from april.workers.engines.entry import EngineEntry, check_request, check_tensors, folder_tensors

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class RunningRequest:
    """A live request and what has been sampled for it."""

    request: Request
    context: list[int]
    """Prompt tokens, then the tokens sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens not returned in a chunk yet."""


class InProcessEngine(EngineEntry):
    """Implements `Engine`; the class is its own registry entry."""

    ready = True
    kv_tokens = None
    dtype = "float32"
    """Data type of the computation; override it if the subclass uses another."""

    def __init__(self, config: Config, device: str, name: str):
        """`device`: "cpu" or "cuda". `name`: the worker's name. Raises EngineError."""
        if config.vocabulary is None or config.context_tokens is None:
            raise EngineError("its config.json has no vocab_size or no max_position_embeddings")
        self.vocabulary, self.max_context = config.vocabulary, config.context_tokens
        self.capacity = config.worker.slots
        self.version: Version | None = None
        self.generated_tokens = 0
        self._chunk_tokens, self._ticks = config.worker.chunk_tokens, Ticks(config.worker.report_s, clock.now())
        self._expected, self._tied = folder_tensors(config.model.path)
        self._requests: dict[int, RunningRequest] = {}
        self._due_chunks: list[Chunk] = []

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "InProcessEngine":
        try:
            return cls(config, device, name)
        except EngineError as error:
            raise ConfigError(f"key 'model.path' = {str(config.model.path)!r} cannot be used: {error}") from None

    # --- to implement in a subclass -----------------------------------------------------------------------------

    def sample(self, running: RunningRequest) -> tuple[int, float]:
        """The next token after `running.context`, and its log-probability.

        `running.request` has temperature, seed and stop tokens.
        """
        raise NotImplementedError

    def set_weights(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Use these weights from the next token on. They are valid; copy them, since they may change after the call."""
        raise NotImplementedError

    # --- the interface ------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return len(self._requests)

    @property
    def queued(self) -> int:
        return max(0, len(self._requests) - self.capacity)

    def submit(self, request: Request) -> None:
        check_request(request, self.vocabulary, self.max_context, self._requests, type(self))
        self._requests[request.id] = RunningRequest(request, request.tokens.tolist())

    def step(self) -> list[Chunk]:
        is_tick = self._ticks.passed(clock.now())
        for running in list(self._requests.values())[: self.capacity] if self.version else ():
            self._advance(running, is_tick)
        due, self._due_chunks = self._due_chunks, []
        return due

    def failures(self) -> list[tuple[int, str]]:
        return []

    def cancel(self, request_id: int) -> list[Chunk]:
        return self.cancel_all([request_id])

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        ended = {key for key in request_ids if key in self._requests}
        for key in ended:
            self._hand_over(self._requests.pop(key))
        due, self._due_chunks = self._due_chunks, []
        self._due_chunks = [chunk for chunk in due if chunk.id not in ended]
        return [chunk for chunk in due if chunk.id in ended]

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        check_tensors(self._expected, self._tied, tensors)
        for running in self._requests.values():
            self._hand_over(running)
        self.set_weights(tensors)
        self.version = version

    def score(self, tokens: np.ndarray) -> np.ndarray:
        raise EngineError("this engine does not score; use an engine whose entry has scores = True")

    def discard_weights(self) -> None:
        self.version = None

    def close(self) -> None: ...

    # --- advancing a request -------------------------------------------------------------------------------------

    def _advance(self, running: RunningRequest, is_tick: bool) -> None:
        request = running.request
        token, logprob = self.sample(running)
        running.context.append(token)
        running.logprobs.append(logprob)
        self.generated_tokens += 1
        full = len(running.context) == len(request.tokens) + request.max_new_tokens
        reason: Finish | None = "stop" if token in request.stop_token_ids else "length" if full else None
        if reason:
            del self._requests[request.id]
        if reason or len(running.logprobs) == self._chunk_tokens or is_tick:
            self._hand_over(running, reason)

    def _hand_over(self, running: RunningRequest, reason: Finish | None = None) -> None:
        if running.logprobs and self.version is not None:
            tokens = np.array(running.context[-len(running.logprobs) :], np.int32)
            logprobs = np.array(running.logprobs, np.float32)
            self._due_chunks.append(Chunk(running.request.id, tokens, logprobs, self.version, reason))
        running.logprobs = []
