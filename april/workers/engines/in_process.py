"""Where an engine of one's own starts: requests, chunks and cancels are kept here; it says only what the next token is.

    class Engine(InProcessEngine):
        def take_weights(self, tensors): ...
        def sample(self, run): return token, logprob

Queued requests wait for one of the slots, in the order in which they came. All tokens are computed in `step`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from april.config import Config, ConfigError
from april.processes import clock
from april.wire.version import Version
from april.workers.engines.base import Chunk, EngineError, Finish, Request
from april.workers.engines.checks import check_request, check_tensors, folder_tensors
from april.workers.engines.entry import EngineEntry
from april.workers.engines.ticks import Ticks

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Run:
    """A request on its way."""

    request: Request
    context: list[int]
    """the prompt, and what was sampled"""
    logprobs: list[float] = field(default_factory=list)
    """of the tokens that were not handed over yet"""


class InProcessEngine(EngineEntry):
    """Implements `Engine`, and is its own entry."""

    ready = True
    kv_tokens = None
    dtype = "float32"
    """a subclass that computes in another says so"""

    def __init__(self, config: Config, device: str, name: str):
        """`device`: "cpu" or "cuda"; `name`: of the worker. Raises EngineError."""
        if config.vocabulary is None or config.context_tokens is None:
            raise EngineError("its config.json has no vocab_size or no max_position_embeddings")
        self.vocabulary, self.max_context = config.vocabulary, config.context_tokens
        self.capacity = config.worker.slots
        self.version: Version | None = None
        self.generated_tokens = 0
        self._chunk_tokens, self._ticks = config.worker.chunk_tokens, Ticks(config.worker.report_s, clock.now())
        self._expected, self._tied = folder_tensors(config.model.path)
        self._runs: dict[int, Run] = {}
        self._due: list[Chunk] = []

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "InProcessEngine":
        try:
            return cls(config, device, name)
        except EngineError as error:
            raise ConfigError(f"key 'model.path' = {str(config.model.path)!r} cannot be used: {error}") from None

    # --- what a subclass says -----------------------------------------------------------------------------------

    def sample(self, run: Run) -> tuple[int, float]:
        """The token that follows the run's context, and its log-probability; `run.request` says how it is drawn."""
        raise NotImplementedError

    def take_weights(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Those of the next token on, checked already; they may change afterwards."""
        raise NotImplementedError

    # --- the interface ------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return len(self._runs)

    @property
    def queued(self) -> int:
        return max(0, len(self._runs) - self.capacity)

    def submit(self, request: Request) -> None:
        check_request(request, self.vocabulary, self.max_context, self._runs, type(self))
        self._runs[request.id] = Run(request, request.tokens.tolist())

    def step(self) -> list[Chunk]:
        is_tick = self._ticks.passed(clock.now())
        for run in list(self._runs.values())[: self.capacity] if self.version else ():
            self._go_on(run, is_tick)
        due, self._due = self._due, []
        return due

    def failures(self) -> list[tuple[int, str]]:
        return []

    def cancel(self, request_id: int) -> list[Chunk]:
        return self.cancel_all([request_id])

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        ended = {key for key in request_ids if key in self._runs}
        for key in ended:
            self._hand_over(self._runs.pop(key))
        due, self._due = self._due, []
        self._due = [chunk for chunk in due if chunk.id not in ended]
        return [chunk for chunk in due if chunk.id in ended]

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        check_tensors(self._expected, self._tied, tensors)
        for run in self._runs.values():
            self._hand_over(run)
        self.take_weights(tensors)
        self.version = version

    def score(self, tokens: np.ndarray) -> np.ndarray:
        raise EngineError("this engine does not score; one whose entry says `scores` does")

    def disown(self) -> None:
        self.version = None

    def close(self) -> None: ...

    # --- a run --------------------------------------------------------------------------------------------------

    def _go_on(self, run: Run, is_tick: bool) -> None:
        request = run.request
        token, logprob = self.sample(run)
        run.context.append(token)
        run.logprobs.append(logprob)
        self.generated_tokens += 1
        full = len(run.context) == len(request.tokens) + request.max_new_tokens
        reason: Finish | None = "stop" if token in request.stop_token_ids else "length" if full else None
        if reason:
            del self._runs[request.id]
        if reason or len(run.logprobs) == self._chunk_tokens or is_tick:
            self._hand_over(run, reason)

    def _hand_over(self, run: Run, reason: Finish | None = None) -> None:
        if run.logprobs and self.version is not None:
            tokens = np.array(run.context[-len(run.logprobs) :], np.int32)
            logprobs = np.array(run.logprobs, np.float32)
            self._due.append(Chunk(run.request.id, tokens, logprobs, self.version, reason))
        run.logprobs = []
