"""Base class for custom engines: it manages requests, chunks and cancels; a subclass samples the next token.

    class Engine(InProcessEngine):
        def set_weights(self, tensors): ...
        def sample(self, running): return token, logprob

Queued requests wait for one of the slots, first come first served. All tokens are computed in `step`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from april.config import Config
from april.data.support import Support
from april.util import clock
from april.util.errors import refuse_for
from april.wire.message import Version
from april.workers.engines.base import Chunk, EngineError, Finish, Request, Ticks
from april.workers.engines.entry import EngineEntry, check_request, check_tensors, folder_tensors

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class RunningRequest:
    """A request that has not ended, and what has been sampled for it."""

    request: Request
    context: list[int]
    """Prompt tokens, then the tokens sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens not returned in a chunk yet."""
    supports: list[np.ndarray] = field(default_factory=list)
    """Supports of the tokens in `logprobs`, int32 [S] each, if the request asks for them."""


class Next(NamedTuple):
    """The next token of a running request."""

    running: RunningRequest
    token: int
    logprob: float
    support: np.ndarray | None = None
    """Ids that the token was drawn from, int32 [S]; required if the request has `with_support`."""


class InProcessEngine(EngineEntry):
    """Base class of engines in the worker's own process: implements `Engine`, and is its own registry entry."""

    ready = True
    kv_tokens = None
    dtype = "float32"
    """Data type of the computation; override it if the subclass uses another."""

    def __init__(self, config: Config, device: str, name: str):
        """`device`: "cpu" or "cuda". `name`: the worker's name. Raises EngineError."""
        self.vocabulary, self.max_context = self.sizes(config)
        self.capacity = config.worker.slots
        self.version: Version | None = None
        self.generated_tokens = 0
        self._chunk_tokens, self._ticks = config.worker.chunk_tokens, Ticks(config.worker.report_s, clock.now())
        self._expected, self._tied = self.expected_tensors(config)
        self._requests: dict[int, RunningRequest] = {}
        self._due_chunks: list[Chunk] = []
        self._failures: list[tuple[int, str]] = []

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> Self:
        try:
            return cls(config, device, name)
        except EngineError as error:
            refuse_for("model.path", config.model.path, "cannot be used", error)

    # --- to implement in a subclass -----------------------------------------------------------------------------

    def sample(self, running: RunningRequest) -> tuple[int, float]:
        """The next token after `running.context`, and its log-probability.

        `running.request` has temperature, seed and stop tokens.
        """
        raise NotImplementedError

    def set_weights(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Use these weights from the next token on. `check_weights` has accepted them; copy them, since the caller may
        change them after the call."""
        raise NotImplementedError

    # --- what a subclass may override ---------------------------------------------------------------------------

    def sizes(self, config: Config) -> tuple[int, int]:
        """(vocabulary size, longest context) of the model, both in tokens. Raises EngineError."""
        if config.vocabulary is None or config.context_tokens is None:
            raise EngineError("its config.json has no vocab_size or no max_position_embeddings")
        return config.vocabulary, config.context_tokens

    def expected_tensors(self, config: Config) -> tuple[dict[str, tuple[int, ...]], bool]:
        """Tensor shapes of the model by name, and whether its output projection is tied to the embedding. Raises
        EngineError."""
        return folder_tensors(config.model.path)

    def advance(self, running: Sequence[RunningRequest]) -> Iterable[Next]:
        """The next tokens of running requests, one each; a request that is left out waits."""
        return [Next(each, *self.sample(each)) for each in running]

    def check_weights(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Raise EngineError unless the tensors are the expected ones, in their shapes, with finite values."""
        check_tensors(self._expected, self._tied, tensors)

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
        running = list(self._requests.values())[: self.capacity] if self.version else []
        sampled = list(self.advance(running)) if running else []
        failed = [each for each in sampled if not math.isfinite(each.logprob)]
        if len(failed) == len(sampled) > 1:
            raise EngineError(f"weights {self.version} give logits that are not finite; load others")
        for each in sampled:
            self._append(each, is_tick)
        due, self._due_chunks = self._due_chunks, []
        return due

    def failures(self) -> list[tuple[int, str]]:
        failures, self._failures = self._failures, []
        return failures

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
        self.check_weights(tensors)
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

    def _append(self, sampled: Next, is_tick: bool) -> None:
        """Append a sampled token to its request, or fail the request if the token's log-probability is not finite.
        `is_tick`: return the request's new tokens as a chunk at once, even if the chunk is not full."""
        running, token, logprob, support = sampled
        request = running.request
        if not math.isfinite(logprob):
            del self._requests[request.id]
            self._failures.append((request.id, f"weights {self.version} give logits that are not finite"))
            return self._hand_over(running)
        running.context.append(token)
        running.logprobs.append(logprob)
        if support is not None:
            running.supports.append(support)
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
            support = Support.of(running.supports) if running.supports else None
            self._due_chunks.append(Chunk(running.request.id, tokens, logprobs, self.version, reason, support))
        running.logprobs, running.supports = [], []
