"""State of one request on SGLang: the bodies sent to the server, and the tokens taken from its events."""

import asyncio
import contextlib
import math
import uuid
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from april.data.support import Support
from april.wire.limits import MAX_CUT_CHUNK_TOKENS, MAX_SUPPORT_IDS
from april.wire.message import Version
from april.workers.engines.base import Chunk, EngineError, Finish, Request
from april.workers.engines.sglang.client import ServerRefuses
from april.workers.engines.sglang.images import SentImages

FINISH_REASONS: dict[str, Finish] = {"stop": "stop", "length": "length"}
"""The server's finish reasons with which a response ends -> April's. With any other reason the request was interrupted,
and its response goes on."""


@dataclass(slots=True, eq=False)
class StreamedRequest:
    """A request that has not ended, over one or several attempts.

    Each attempt is one streamed call of /generate; a weight update interrupts it, and the next one continues it.
    """

    request: Request
    images: SentImages | None = None
    """The request's images, if it has some."""
    context: list[int] = field(default_factory=list)
    """Token ids that the current attempt began with: the prompt, and the response tokens generated before."""
    rid: str = ""
    """SGLang's id of the current attempt. All have one length, because SGLang aborts every id with a given prefix."""
    generated: list[int] = field(default_factory=list)
    """Tokens generated in all attempts so far."""
    attempt_tokens: int = 0
    """Number of tokens received in the current attempt."""
    version: Version | None = None
    """Policy version under which the tokens in `pending` (not returned in a chunk yet) were sampled."""
    pending: list[int] = field(default_factory=list)
    """Tokens that were not returned in a chunk yet."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens in `pending` (not returned in a chunk yet)."""
    supports: list[np.ndarray] = field(default_factory=list)
    """Supports (candidate ids under truncated sampling) of the tokens in `pending`, which were not returned in a chunk
    yet; [] if the request does not ask for them."""
    task: asyncio.Task | None = None
    finish_reason: Finish | None = None
    """Finish reason that the server has reported: the response has ended with the tokens in `pending`, which are still
    to be returned in a chunk; None as long as the response goes on."""
    interrupted: bool = False
    """Whether the current attempt was aborted to continue under other weights."""
    ended: bool = False

    def start_attempt(self) -> None:
        """Begin a new attempt, which continues after the tokens of earlier ones."""
        self.rid, self.attempt_tokens, self.interrupted = uuid.uuid4().hex, 0, False

    def body(self, version: Version, stream_tokens: int) -> dict[str, Any]:
        """Body of POST /generate, with `stream_tokens` tokens per event. It states every default, and uses the version
        as key of the prefix cache. Raises EngineError for images that the server cannot be shown with the tokens
        sampled so far."""
        request = self.request
        self.context = [*request.tokens.tolist(), *self.generated]
        sampling = {
            "max_new_tokens": request.max_new_tokens - len(self.generated),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "repetition_penalty": 1.0,
            "sampling_seed": fold_seed(request.seed),
            "stream_interval": stream_tokens,
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": not request.stop_token_ids,
        }
        body = {
            "rid": self.rid,
            "input_ids": self.context,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "extra_key": str(version),
        }
        if self.images:
            try:
                body |= self.images.fields(self.context)
            except ValueError as error:
                raise EngineError(f"request {request.id} cannot be shown its images: {error}") from None
        return body | {"return_sampling_mask": True} if request.with_support else body

    def take_event(self, event: dict, version: Version | None) -> int:
        """Take the new tokens of an event, sampled under `version`; returns their number. Raises ServerRefuses.

        Events are incremental or cumulative, as the server streams. The last event of a request that is aborted while
        queued repeats its last token and all log-probabilities, after increments that were never sent. So the new
        tokens are read from the end of the log-probabilities, each of which includes its token's id.
        """
        meta = event["meta_info"]
        total = meta.get("completion_tokens", self.attempt_tokens)
        new = total - self.attempt_tokens
        if not new:
            return 0
        if self.images and not self.attempt_tokens:
            self.check_context(event.get("prompt_token_ids"))
        entries = meta["output_token_logprobs"][-new:]
        ids = [entry[1] for entry in entries]
        if len(ids) != new or ids[-1:] != event["output_ids"][-1:]:
            raise ServerRefuses("the server sent tokens whose log-probabilities are those of others")
        if version is None:
            raise ServerRefuses(
                f"the server samples from weights {meta['weight_version']!r}, which are somebody else's"
            )
        if self.request.with_support:
            supports, logprobs = (meta.get(f"output_token_sampling_{kind}", [])[-new:] for kind in ("mask", "logprobs"))
            check_supports(ids, supports, logprobs)
            self.supports += [np.array(support, np.int32) for support in supports]
        else:
            logprobs = [entry[0] for entry in entries]
        if not all(logprob is not None and math.isfinite(logprob) for logprob in logprobs):
            raise ServerRefuses("the server sent a log-probability that is not finite")
        self.attempt_tokens, self.version = total, version
        self.pending += ids
        self.generated += ids
        self.logprobs += logprobs
        return new

    def check_context(self, read: list[int] | None) -> None:
        """Raise ServerRefuses unless the token ids that the server has `read`, images included, are those of the
        attempt's context."""
        if read != self.context:
            found = "does not say what it has read" if read is None else f"has read {len(read)} other tokens"
            raise ServerRefuses(
                f"the server was sent a context of {len(self.context)} tokens with images, and {found}; use SGLang "
                "0.5.23 with its own image processor, and SGLANG_MM_AVOID_RETOKENIZE unset"
            )

    def end_reached(self, kind: str) -> Finish | None:
        """The finish reason if the response has ended, otherwise None.

        `kind`: type of the finish reason that the server gave. An abort in the same step hides that the response has
        ended; this is then seen from its tokens.
        """
        if kind in FINISH_REASONS:
            return FINISH_REASONS[kind]
        if self.generated and self.generated[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.generated) == self.request.max_new_tokens else None

    def hand_over(self, chunk_tokens: int) -> list[Chunk]:
        """Return the tokens that were not returned yet in chunks of at most `chunk_tokens`, the last with the finish
        reason, if the response has ended."""
        if self.request.with_support:
            chunk_tokens = min(chunk_tokens, MAX_CUT_CHUNK_TOKENS)
        chunks: list[Chunk] = []
        if self.version is None:
            return chunks
        for start in range(0, len(self.pending), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            ended = self.finish_reason if part.stop >= len(self.pending) else None
            tokens, logprobs = np.array(self.pending[part], np.int32), np.array(self.logprobs[part], np.float32)
            support = Support.of(self.supports[part]) if self.request.with_support else None
            chunks.append(Chunk(self.request.id, tokens, logprobs, self.version, ended, support))
        self.pending, self.logprobs, self.supports = [], [], []
        return chunks


def fold_seed(seed: int) -> int:
    """Hash a 64-bit seed to the 31 bits that servers take."""
    return zlib.crc32((seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")) >> 1


def check_supports(ids: list[int], supports: list[list[int]], logprobs: list[float]) -> None:
    """Raise ServerRefuses unless each token has a support that contains it, and a log-probability."""
    if not len(ids) == len(supports) == len(logprobs):
        raise ServerRefuses("the SGLang server sent tokens without the supports that they were drawn from")
    if any(token not in support for token, support in zip(ids, supports, strict=True)):
        raise ServerRefuses("the SGLang server sent a token that is not in its support")
    if max(map(len, supports)) > MAX_SUPPORT_IDS:
        raise ServerRefuses(
            f"the SGLang server sent a support of more than {MAX_SUPPORT_IDS} ids; lower sampling.top_k"
        )


STEP_S = 0.02
"""Longest wait of a step (s); the broker's messages and the verifiers' scores wait as long."""


class StepSignal(asyncio.Event):
    """Event that wakes a waiting step. Engines that share an event loop share one signal.

    It is set when a chunk can be returned, a request has ended in any way, or a weight update has ended.
    """

    async def wait_for_work(self, expected: bool) -> None:
        """Wait for the signal, at most STEP_S seconds. If no work is `expected`, do not wait, and only run the event
        loop once."""
        if not expected:
            return await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                await self.wait()
