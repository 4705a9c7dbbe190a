"""The interface of a generation engine: requests in, chunks of tokens out.

An engine is driven from one thread. A request is live from `submit` until a chunk with a finish reason, or until
`cancel`. Every generated token leaves the engine exactly once, in order:

    engine.load_weights(Version(0, 0), tensors)
    engine.submit(request)
    while not done:
        for chunk in engine.step():       # one decode step of every running sequence
            ...                           # new tokens, right after those of earlier chunks
    rest = engine.cancel(request.id)      # empty when the request has ended already

The engines share `Ticks`, the times of their chunks, and `CapacityRule`, the number of their requests.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from april.data.support import Support
from april.wire.message import Version

if TYPE_CHECKING:
    import torch

    from april.weights.channel import Adapter


Finish = Literal["stop", "length"]


class EngineError(RuntimeError):
    """The engine refuses a request or a set of weights; the text says why and how to fix it."""


@dataclass(frozen=True)
class Request:
    """One sample to generate or to resume."""

    id: int
    """Id, unique among the engine's requests that run or are queued; the worker uses the lease id."""
    tokens: np.ndarray
    """int32 [P + R]: the prompt, then the response tokens generated so far."""
    max_new_tokens: int
    """Maximum number of tokens to generate in this request: what is left of the response's budget."""
    seed: int = 0
    """Sampling seed of the sample. With the embedded engine, equal seeds and weights give equal tokens whatever else is
    running; docs/sglang.md and docs/vllm.md say how far that holds for servers."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 for all."""
    min_p: float = 0.0
    """Least probability a token may have, as a share of the likeliest token's; 0 for no limit."""
    with_support: bool = False
    """Whether to return the ids each token was drawn from (its support), and normalise log-probabilities over them."""
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Token ids that end the response; the stop token is its last token."""
    images: tuple[bytes, ...] = ()
    """The images of the tokens as PNG files (`april.data.images`), in the order of their placeholders."""
    image_starts: tuple[int, ...] = ()
    """For each image, the index in `tokens` of the first token that may be its placeholder; empty stands for 0 for all
    images. The images claim placeholders in their order: each takes the first ones from its index on that no earlier
    image has claimed. Placeholder ids that no image claims were sampled by the policy, and count as text."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request, at least one, all sampled under one policy version."""

    id: int
    """Id of the request."""
    tokens: np.ndarray
    """int32 [T]: ids of the new tokens."""
    logprobs: np.ndarray
    """float32 [T]: log-probability of each token by log-softmax(logits / temperature), normalised over the token's
    support if the request asked for supports. At temperature 0 (greedy), temperature 1 stands in the formula."""
    version: Version
    finish_reason: Finish | None = None
    """"stop" or "length" on the last chunk of a request, otherwise None."""
    support: Support | None = None
    """Token ids that each token was drawn from; None unless the request asked for them."""


class Engine(Protocol):
    """The interface that a worker drives; all methods are called from one thread."""

    @property
    def version(self) -> Version | None:
        """Policy version of the weights that the next token is sampled from.

        None before the first `load_weights`, and after the engine has lost its weights.
        """

    @property
    def ready(self) -> bool:
        """Whether weights can be loaded now; False while the engine's server is down."""

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a prompt and its response together."""

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated since the engine was created, including those not returned by `step` yet.

        An engine on a server counts the tokens that have arrived from the server.
        """

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError for a request that can never run."""

    def step(self) -> list[Chunk]:
        """Advance every running sequence, by a token or for a few milliseconds, and return the chunks to hand over:
        those that are full or end a request, and at a tick (`Ticks`) all new tokens.

        Returns no chunks without weights. Called in every pass of the worker's loop, also when no request runs or is
        queued. Raises EngineError if the engine can never continue.
        """

    def failures(self) -> list[tuple[int, str]]:
        """(id, reason) of each request that has failed since the last call.

        Call after `step`, which has returned all tokens of a failed request.
        """

    def cancel(self, request_id: int) -> list[Chunk]:
        """End a request and return its remaining chunks, oldest first; an empty list if it has ended already.

        If it finished before it could be cancelled, the last chunk has its finish reason.
        """

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        """Cancel several requests at once; the chunks of each request are in order."""

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Replace all weights between two decode steps; running sequences continue under `version`.

        Their contexts are recomputed, so that every later log-probability is that of `version` alone. Raises
        EngineError; the old weights then stay, or the engine has none.
        """

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """The engine's log-probabilities, float32 [T - 1], of `tokens[1:]`, each given the tokens before it, at
        temperature 1.

        `tokens`: int32 [T]. Running requests are not affected. Raises EngineError; an engine whose registry entry has
        `scores` = False always does.
        """

    @property
    def dtype(self) -> str:
        """Data type of the computation: float32, bfloat16, float16, or another name."""

    def discard_weights(self) -> None:
        """Discard the weights loaded last, because they are wrong.

        The engine has no weights until others are loaded, and returns no token sampled under the discarded ones.
        Running requests wait, or fail.
        """

    @property
    def live(self) -> int:
        """Number of requests running or queued."""

    @property
    def queued(self) -> int:
        """Number of requests that are queued, not running: they wait for a slot or for memory."""

    @property
    def capacity(self) -> int:
        """Number of requests, running and queued, that the engine can make use of at present: it bounds the samples
        that the worker takes."""

    @property
    def kv_tokens(self) -> int | None:
        """Size of the KV cache in tokens; None if unknown."""

    def close(self) -> None: ...


class TimeSharingEngine(Engine, Protocol):
    """An engine that can share its accelerator in time with the learner (its registry entry has `shares_time`)."""

    def release(self) -> None:
        """Release the accelerator's memory, weights included; called while no request runs or is queued.

        If a server fails to release its memory, it is killed, and restarted when the engine may use the accelerator
        again.
        """

    def resume(self) -> None:
        """Acquire the accelerator's memory again; the engine has no weights until some are loaded."""


class AdapterEngine(Engine, Protocol):
    """An engine that loads adapters on top of the base model's weights (its registry entry has `takes_adapters`)."""

    def load_adapter(self, version: Version, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]") -> None:
        """Replace the current adapter by another one, between two decode steps; running sequences and errors are
        treated as in `load_weights`. `adapter`: its settings. `tensors`: its tensors, as in
        `april.weights.base.Adapted`."""


@runtime_checkable
class ComparingEngine(Protocol):
    """An engine that can compare the tensors that it holds with others."""

    def differing(self, tensors: "Mapping[str, torch.Tensor]") -> list[str]:
        """Names of the tensors that the engine holds with other values than `tensors`, rounded to the engine's data
        type. `tensors`: as for `load_weights`. Called only while the engine has weights."""


# --- helpers of engines -----------------------------------------------------------------------------------------------


class Ticks:
    """Instants `period_s` apart at which an engine returns the new tokens of all its sequences, in one message.

    The first is random, so that engines started together do not tick together.
    """

    def __init__(self, period_s: float, now: float):
        self.period_s = period_s
        self.next = now + period_s * random.random()

    def passed(self, now: float) -> bool:
        """Whether a tick has passed since the last call that returned True. `now`: seconds of the same monotonic clock
        in all calls."""
        if now < self.next:
            return False
        missed = math.floor((now - self.next) / self.period_s) if self.period_s else 0
        self.next += (missed + 1) * self.period_s
        return True


FULL_CACHE_SHARE = 0.9
"""Share of the KV cache in use from which on the number of requests kept on a server does not grow."""
CAPACITY_GROWTH = 1.25
"""Factor by which the number of requests grows with each report of a server that has no queue and less than
FULL_CACHE_SHARE of its cache in use."""


class CapacityRule:
    """Decides how many requests to keep on a server, from the load that the server reports; at most `slots`."""

    OBSERVED = ("num_running_reqs", "num_waiting_reqs", "token_usage", "max_running_requests")

    def __init__(self, slots: int):
        self.slots = slots
        self.requests = slots
        self.waiting = 0
        """Number of queued requests that the server last reported."""

    def observe(
        self, num_running_reqs: int, num_waiting_reqs: int, token_usage: float, max_running_requests: int
    ) -> None:
        """Adapt the number of requests to a server's report of its load.

        `num_running_reqs`, `num_waiting_reqs`: number of requests that run and that are queued in the server.
        `token_usage`: share of the KV cache in use, 0 to 1. `max_running_requests`: most requests that the server runs
        at a time, 0 if unknown.
        """
        self.waiting = num_waiting_reqs
        most = min(self.slots, max_running_requests or self.slots)
        if num_waiting_reqs and num_running_reqs < most and token_usage >= FULL_CACHE_SHARE:
            self.requests = max(1, num_running_reqs)
        elif not num_waiting_reqs and token_usage < FULL_CACHE_SHARE:
            self.requests = max(self.requests + 1, int(self.requests * CAPACITY_GROWTH))
        self.requests = min(self.requests, most)
