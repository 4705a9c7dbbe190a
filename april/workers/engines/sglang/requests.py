"""Live requests of one server: admission, streaming, interruption by a weight update, and chunks.

When the server or its weights go away, the tokens generated so far are returned first:

    submitted -> queued -> streaming -> finished
                   ^           |
                   +-----------+   weight update: aborted with its tokens, resubmitted with them in the context

A request for the scores of a text is a single call.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from april.util import clock
from april.wire.message import Version
from april.workers.engines.base import Chunk, EngineError, Request, Ticks
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, SGLangClient
from april.workers.engines.sglang.images import ImageTokens, SentImages
from april.workers.engines.sglang.run import StepSignal, StreamedRequest

log = logging.getLogger(__name__)

CANCEL_S = 3.0
"""Longest wait for aborted requests to end (s); after it, no further tokens of theirs are taken."""
ABORT_S = 4.0
"""Longest wait for a server to accept an abort (s); short enough that the samples on a worker's other servers are still
given back within `broker.abort_deadline_s`."""
ABORT_AGAIN_S = 0.3
"""Interval at which an abort is repeated (s), since it misses a request that the scheduler has not seen yet."""
DISOWNED = "the weights that it ran under are not those of their version"


class ServerRequests:
    """Base class of `SGLangEngine`: the engine's requests on its server. The engine manages server and weights."""

    server_name = "SGLang"
    model_path: Path

    def __init__(
        self, chunk_tokens: int, stream_tokens: int, report_s: float, loop: asyncio.AbstractEventLoop | None,
        step_signal: StepSignal | None,
    ):  # fmt: skip
        self.version: Version | None = None
        self.generated_tokens = 0
        self.restarts = 0
        """Number of restarts of the server since it last finished a request."""
        self.chunk_tokens, self._ticks = chunk_tokens, Ticks(report_s, clock.now())
        self.stream_tokens = min(stream_tokens, chunk_tokens)
        self._queue: dict[int, StreamedRequest] = {}
        self._streaming: dict[int, StreamedRequest] = {}
        self._chunks: list[Chunk] = []
        self._failures: list[tuple[int, str]] = []
        self._unverified: Version | None = None
        """Version that is loaded but has not passed its weight check; chunks of its tokens are held back."""
        self._names: dict[str, Version] = {}
        """Policy versions by the name that the server reports with tokens (`weight_version`)."""
        self._updating = False
        self._last_event_at = clock.now()
        self._loop, self._owns_loop = loop or asyncio.new_event_loop(), loop is None
        self._tasks: set[asyncio.Task] = set()
        self._step_signal, self._alarm = step_signal or StepSignal(), asyncio.Event()
        self._client: SGLangClient | None = None

    @property
    def client(self) -> SGLangClient:
        """Client of the server, or of the last one if it has been killed. Raises ServerGone if no server was reached
        yet."""
        if self._client is None:
            raise ServerGone(f"no {self.server_name} server has been reached yet")
        return self._client

    @cached_property
    def _image_tokens(self) -> ImageTokens | None:
        """The model's placeholder ids and its rule for the number of an image's tokens; None if the model takes no
        images."""
        return ImageTokens.of(self.model_path)

    def images_of(self, request: Request) -> SentImages | None:
        """The images of a request, in SGLang's form; None if it has none. Raises EngineError for images that do not fit
        the request or the model."""
        return SentImages.of(request, self._image_tokens) if request.images else None

    @property
    def live(self) -> int:
        return len(self._queue) + len(self._streaming)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request with this id runs or is queued."""
        return request_id in self._queue or request_id in self._streaming

    def failures(self) -> list[tuple[int, str]]:
        failures, self._failures = self._failures, []
        return failures

    def begin(self, work: Coroutine) -> asyncio.Task:
        """Start a coroutine, which advances while the engine is stepped."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _admit(self) -> None:
        """Send all queued requests to the server, which has a queue of its own; none during a weight update."""
        if self.version is None or self._updating:
            return
        if not self._streaming:
            self._last_event_at = clock.now()
        for key in list(self._queue):
            streamed = self._queue.pop(key)
            self._streaming[key] = streamed
            streamed.start_attempt()
            streamed.task = self.begin(self._stream(streamed, self.version))

    async def _stream(self, streamed: StreamedRequest, version: Version) -> None:
        try:
            finish: dict = {}
            async with contextlib.aclosing(self.client.generate(streamed.body(version, self.stream_tokens))) as events:
                async for event in events:
                    finish = self._take(streamed, event) or finish
            self._finish(streamed, finish)
        except ServerGone as error:
            log.warning("%s", error)
            self._alarm.set()
        except EngineError as error:
            self._fail(streamed, str(error))
        except Exception as error:
            log.exception("request %d", streamed.request.id)
            self._fail(streamed, f"{type(error).__name__}: {error}")

    def _take(self, streamed: StreamedRequest, event: dict) -> dict | None:
        """Take the new tokens of an event of a request's stream; returns SGLang's finish reason (a dict) if the event
        is the request's last, otherwise None."""
        version = self._names.get(event["meta_info"]["weight_version"])
        if streamed.pending and streamed.version != version:
            self._hand_over(streamed)
        self.generated_tokens += streamed.take_event(event, version)
        finish = event["meta_info"]["finish_reason"]
        if finish:
            streamed.finish_reason = streamed.end_reached(finish["type"])
        if len(streamed.pending) >= self.chunk_tokens and not finish:
            self._hand_over(streamed)
        self._last_event_at = clock.now()
        return finish

    def _finish(self, streamed: StreamedRequest, finish: dict) -> None:
        kind = finish.get("type")
        if streamed.finish_reason:
            self.restarts = 0
            self._end(streamed)
        elif kind == "abort" and streamed.interrupted:
            self._requeue(streamed)
        elif not streamed.ended:
            self._fail(streamed, f"the {self.server_name} server ended a request: {finish.get('message') or finish}")

    def _requeue(self, streamed: StreamedRequest) -> None:
        if not streamed.ended:
            self._streaming.pop(streamed.request.id, None)
            self._queue[streamed.request.id] = streamed

    def _end(self, streamed: StreamedRequest) -> None:
        """End a request: its remaining tokens become chunks, which `collect` returns later."""
        if streamed.ended:
            return
        self._hand_over(streamed)
        streamed.ended = True
        self._streaming.pop(streamed.request.id, None)
        self._queue.pop(streamed.request.id, None)

    def _fail(self, streamed: StreamedRequest, why: str) -> None:
        if not streamed.ended:
            self._end(streamed)
            self._failures.append((streamed.request.id, why))

    def _hand_over(self, streamed: StreamedRequest) -> None:
        self._chunks += streamed.hand_over(self.chunk_tokens)
        self._step_signal.set()

    def _hand_over_due(self) -> None:
        if self._ticks.passed(clock.now()):
            for streamed in self._streaming.values():
                if streamed.pending:
                    self._hand_over(streamed)

    # --- interruption -------------------------------------------------------------------------------------------

    async def _abort(self, streamed_requests: list[StreamedRequest]) -> None:
        """Abort requests, and wait until each has ended with all its tokens, the server fails, or CANCEL_S have passed.

        Raises ServerGone if the server does not confirm the abort, which could then hit later requests.
        """
        begun = clock.now()
        waiting = {streamed.task: streamed for streamed in streamed_requests if streamed.task}
        while waiting and (passed_s := clock.now() - begun) < CANCEL_S and not self._alarm.is_set():
            is_all = len(waiting) == len(self._streaming) and self._unverified is None
            bodies = [{"abort_all": True}] if is_all else [{"rid": streamed.rid} for streamed in waiting.values()]
            try:
                remaining_s = ABORT_S - passed_s
                await asyncio.gather(*(self.client.call("/abort_request", body, remaining_s) for body in bodies))
            except ServerRefuses as error:
                raise ServerGone(str(error)) from None
            done, _ = await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
            for task in done:
                del waiting[task]
        for task, streamed in waiting.items():
            log.warning(
                "request %d did not end after its abort; it continues from the tokens that have arrived",
                streamed.request.id,
            )
            task.cancel()
            if streamed.interrupted:
                self._requeue(streamed)

    def _disown(self, wrong: Version) -> None:
        """Discard the weights `wrong`, and fail all running requests: some of their tokens may be sampled from them."""
        self.version = None
        for streamed in list(self._streaming.values()):
            if streamed.task:
                streamed.task.cancel()
            self._fail(streamed, DISOWNED)
        self._forget_tokens(wrong)

    def _forget_tokens(self, wrong: Version) -> None:
        """Drop the chunks of version `wrong` that were not returned yet, and fail requests that ended in them."""
        ended = [chunk.id for chunk in self._chunks if chunk.version == wrong and chunk.finish_reason]
        self._failures += [(key, DISOWNED) for key in ended]
        self._chunks = [chunk for chunk in self._chunks if chunk.version != wrong]


# --- scores of a text -------------------------------------------------------------------------------------------------

DTYPES = {"half": "float16", "float": "float32"}
"""Data type name of a server -> April's name, where the two differ."""


def score_body(tokens: np.ndarray) -> dict[str, Any]:
    """Body of the POST /generate that scores `tokens`; the server cannot take scores from its prefix cache."""
    rid = uuid.uuid4().hex
    sampling = {
        "max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "sampling_seed": 0, "stop_token_ids": [], "ignore_eos": True,
    }  # fmt: skip
    return {
        "rid": rid, "input_ids": tokens.tolist(), "sampling_params": sampling, "return_logprob": True,
        "logprob_start_len": 0, "stream": False, "extra_key": rid,
    }  # fmt: skip


def read_scores(answer: Any, tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Log-probabilities, float32 [T - 1], of all `tokens` but the first, from the server's `answer` to `score_body`.
    Raises ServerRefuses if the answer is about other tokens. `vocabulary`: number of token ids.

    SGLang scores the largest token id, `vocabulary` - 1, correctly, but reports it as id 0.
    """
    entries = answer["meta_info"].get("input_token_logprobs") or []
    asked = np.where(tokens == vocabulary - 1, 0, tokens)[1:].tolist()
    if [entry[1] if entry[1] != vocabulary - 1 else 0 for entry in entries[1:]] != asked:
        raise ServerRefuses(f"the server scores {len(entries)} tokens where {len(tokens)} were asked for, or others")
    return np.array([entry[0] for entry in entries[1:]], np.float32)


def server_dtype(reported: str, declared: str) -> str:
    """Data type that a server computes in, if it reports `reported`.

    `auto` stands for the type `declared` by the model's folder, with bfloat16 in place of float32.
    """
    name = declared if reported == "auto" else reported
    name = DTYPES.get(name, name).removeprefix("torch.")
    return "bfloat16" if reported == "auto" and name == "float32" else name
