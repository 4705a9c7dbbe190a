"""What a generation engine is to a worker: requests in, chunks of tokens out.

An engine is driven from one thread. A request lives from `submit` until a chunk with a finish reason, or
until `cancel`. Every generated token leaves the engine exactly once, in order:

    engine.load_weights(Version(0, 0), tensors)
    engine.submit(request)
    while not done:
        for chunk in engine.step():       # one decode step of every running sequence
            ...                           # chunk.start == tokens of this request handed over before
    rest = engine.cancel(request.id)      # empty when the request has ended already
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from april.data.support import Support
from april.wire.version import Version

if TYPE_CHECKING:
    import torch

    from april.weights.lane_messages import Adapter


Finish = Literal["stop", "length"]


class EngineError(RuntimeError):
    """A request or a set of weights that the engine refuses; the text says why and how to mend it."""


@dataclass(frozen=True)
class Request:
    """One sample to generate or to go on generating."""

    id: int
    """unique among the engine's live requests"""
    tokens: np.ndarray
    """int32 [P + R]: the prompt and what earlier segments have produced"""
    max_new_tokens: int
    """what is left of the response budget (tokens)"""
    seed: int = 0
    """of the sample; where the engine draws by it, the same weights give the same tokens, whatever else is running: the
    embedded one always, a server as far as docs/sglang.md and docs/vllm.md say"""
    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token"""
    min_p: float = 0.0
    """least share of the likeliest token's mass"""
    with_support: bool = False
    """each token comes with the ids that it was drawn from, and its log-probability is renormalised over them"""
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """a stop token ends the response and is its last token"""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request, all sampled under one version."""

    id: int
    tokens: np.ndarray
    """int32 [T]"""
    logprobs: np.ndarray
    """float32 [T]: log-softmax(logits / temperature) of each token, over its support where there is one; temperature 1
    when greedy"""
    version: Version
    finish_reason: Finish | None = None
    """"stop" | "length" on the last chunk of a request, otherwise None; no chunk is empty"""
    support: Support | None = None
    """of each token, where the request asks for it"""


class Engine(Protocol):
    @property
    def version(self) -> Version | None:
        """Of the weights that the next token is sampled from; None before the first `load_weights`, and after the
        engine has lost what it had."""

    @property
    def ready(self) -> bool:
        """Whether weights can be loaded: an engine behind a server that is down is not."""

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt with its response."""

    @property
    def generated_tokens(self) -> int:
        """Tokens since the engine was made, handed over or not: sampled, or, where a server samples, arrived from
        it."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError for one that can never run."""

    def step(self) -> list[Chunk]:
        """Go on with every running sequence, by a token or for a few milliseconds; return the chunks that are due.

        None without weights. Called all the time, also when nothing is live. Raises EngineError if the engine can
        never go on.
        """

    def failures(self) -> list[tuple[int, str]]:
        """(id, why) of requests that have ended before they were finished, since this was last asked.

        Ask after `step`, which has handed over all that there is of their tokens.
        """

    def cancel(self, request_id: int) -> list[Chunk]:
        """End a request and return its tokens not handed over yet, oldest first; none if it is not live.

        Where it finished before it could be ended, the last chunk says so.
        """

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        """The same for many at once, each one's chunks in order."""

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Swap all weights between two decode steps; running sequences go on under `version`.

        Their context is computed anew, so that every later log-probability is that of `version` alone. Raises
        EngineError: then the old weights stay, or the engine has none.
        """

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities float32 [T - 1] of int32 [T] but the first, each behind those before it, at temperature 1,
        under the weights that it holds; nothing that runs is changed by that. Raises EngineError, always where the
        entry does not say `scores`."""

    @property
    def dtype(self) -> str:
        """That it computes in: float32, bfloat16, float16, or another name."""

    def disown(self) -> None:
        """The weights loaded last are wrong: it has none until others are loaded, and no token sampled under them is
        handed over. What runs waits, or fails."""

    @property
    def live(self) -> int:
        """Requests that are running or queued."""

    @property
    def queued(self) -> int:
        """Of these, those that it has yet to begin, or to go on with: they wait for a slot or for memory."""

    @property
    def capacity(self) -> int:
        """Requests that it makes sense to have live, as far as the engine knows now."""

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that its KV cache has room for; None if it does not say."""

    def close(self) -> None: ...


class TurnTaker(Engine, Protocol):
    """An engine whose entry says that it `takes_turns` on its accelerator with the learner."""

    def release(self) -> None:
        """Let go of the accelerator's memory, weights and all, while nothing is live. Where that fails, what holds the
        memory is ended, and comes back in the next turn."""

    def resume(self) -> None:
        """Take the memory again; there are no weights before some are loaded."""


class AdapterTaker(Engine, Protocol):
    """An engine whose entry says that it `takes_adapters`."""

    def load_adapter(self, version: Version, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]") -> None:
        """`load_weights` of the model's own, with an adapter in the place of the one before: `tensors` as of
        `april.weights.base.Adapted`."""
