"""One request on SGLang: what is asked of the server, and what is kept of the events it answers with."""

import asyncio
import math
import uuid
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from april.data.support import Support
from april.wire.limits import CUT_CHUNK_TOKENS, SUPPORT_IDS
from april.wire.version import Version
from april.workers.engines.base import Chunk, Finish, Request
from april.workers.engines.sglang.client import ServerRefuses

ENDS: dict[str, Finish] = {"stop": "stop", "length": "length"}
"""as a server says that a response has come to its end; anything else is an interruption"""


@dataclass(slots=True, eq=False)
class Run:
    """A live request, over all the answers of the server that it takes."""

    request: Request
    rid: str = ""
    """of the answer under way; all are of one length, because SGLang aborts every id that starts with a given one"""
    generated: list[int] = field(default_factory=list)
    received: int = 0
    """tokens of the answer under way"""
    version: Version | None = None
    """of the pending tokens"""
    pending: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """of the pending tokens, which are not handed over yet"""
    supports: list[np.ndarray] = field(default_factory=list)
    """of the pending tokens, where they are asked for"""
    task: asyncio.Task | None = None
    finish_reason: Finish | None = None
    """stop | length once the server has said so; the pending tokens are then the last"""
    interrupted: bool = False
    """aborted so that it can go on under other weights"""
    ended: bool = False

    def begin(self) -> None:
        """Another answer is asked for, behind everything that earlier ones have brought."""
        self.rid, self.received, self.interrupted = uuid.uuid4().hex, 0, False

    def body(self, version: Version, stream_tokens: int) -> dict[str, Any]:
        """Of POST /generate. Every default is stated; the prefix cache is that of the version."""
        request = self.request
        sampling = {
            "max_new_tokens": request.max_new_tokens - len(self.generated),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "repetition_penalty": 1.0,
            "sampling_seed": fold(request.seed),
            "stream_interval": stream_tokens,
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": not request.stop_token_ids,
        }
        body = {
            "rid": self.rid,
            "input_ids": [*request.tokens.tolist(), *self.generated],
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "extra_key": str(version),
        }
        return body | {"return_sampling_mask": True} if request.with_support else body

    def take(self, event: dict, version: Version | None) -> int:
        """Keep the new tokens of an event, sampled under `version`; how many they are. Raises ServerRefuses.

        Events are increments, or cumulative where the server streams so; the last one of a request that is aborted
        while it waits repeats its last token and all log-probabilities, behind increments that were not sent yet.
        What is new is thus the end of the log-probabilities, each of which has its token's id.
        """
        meta = event["meta_info"]
        total = meta.get("completion_tokens", self.received)
        new = total - self.received
        if not new:
            return 0
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
        self.received, self.version = total, version
        self.pending += ids
        self.generated += ids
        self.logprobs += logprobs
        return new

    def end_reached(self, said: str) -> Finish | None:
        """stop | length, by the tokens where the server only has `said` abort: that wins over an end that is reached
        in the same step."""
        if said in ENDS:
            return ENDS[said]
        if self.generated and self.generated[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.generated) == self.request.max_new_tokens else None

    def hand_over(self, chunk_tokens: int) -> list[Chunk]:
        """The pending tokens in chunks of at most `chunk_tokens`, the last with the finish reason if there is one."""
        if self.request.with_support:
            chunk_tokens = min(chunk_tokens, CUT_CHUNK_TOKENS)
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


def fold(seed: int) -> int:
    """All 64 bits of a seed in the 31 that servers take."""
    return zlib.crc32((seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")) >> 1


def check_supports(ids: list[int], supports: list[list[int]], logprobs: list[float]) -> None:
    """Raise ServerRefuses unless each token has one that it is in, and a log-probability within it."""
    if not len(ids) == len(supports) == len(logprobs):
        raise ServerRefuses("the SGLang server sent tokens without the supports that they were drawn from")
    if any(token not in support for token, support in zip(ids, supports, strict=True)):
        raise ServerRefuses("the SGLang server sent a token that is not in its support")
    if max(map(len, supports)) > SUPPORT_IDS:
        raise ServerRefuses(f"the SGLang server sent a support of more than {SUPPORT_IDS} ids; lower sampling.top_k")
