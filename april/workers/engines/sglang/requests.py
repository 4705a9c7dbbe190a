"""What runs on one server: streamed, interrupted, and handed over.

What a request has generated when the server or its weights go away is handed over first:

    submitted -> queued -> streaming -> finished
                   ^           |
                   +-----------+   weights change: aborted with all its tokens, submitted again behind them
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine

from april.processes import clock
from april.wire.version import Version
from april.workers.engines.base import Chunk
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, SGLangClient
from april.workers.engines.sglang.news import News
from april.workers.engines.sglang.run import Run
from april.workers.engines.ticks import Ticks

log = logging.getLogger(__name__)

CANCEL_S = 3.0
"""aborted requests have so long to come back; then what has arrived of them is all there is"""
ABORT_S = 4.0
"""longest wait for a server to take an abort: by then the samples of the others behind a worker are handed back within
`broker.abort_deadline_s`"""
ABORT_AGAIN_S = 0.3
"""an abort does not reach a request that the scheduler has not seen yet; it is said again after this long"""
DISOWNED = "the weights that it ran under are not those of their version"


class ServerRequests:
    """An engine's requests on its server. The engine inherits them, and says when they run and under which weights."""

    server_name = "SGLang"

    def __init__(
        self, chunk_tokens: int, stream_tokens: int, report_s: float, loop: asyncio.AbstractEventLoop | None,
        news: News | None,
    ):  # fmt: skip
        self.version: Version | None = None
        self.generated_tokens = 0
        self.restarts = 0
        """of the server, since it last finished a request"""
        self.chunk_tokens, self._ticks = chunk_tokens, Ticks(report_s, clock.now())
        self.stream_tokens = min(stream_tokens, chunk_tokens)
        self._queue: dict[int, Run] = {}
        self._streaming: dict[int, Run] = {}
        self._chunks: list[Chunk] = []
        self._failures: list[tuple[int, str]] = []
        self._unproven: Version | None = None
        """loaded, and not proven yet: its tokens wait"""
        self._names: dict[str, Version] = {}
        """versions by what the server calls them"""
        self._updating = False
        self._heard_at = clock.now()
        self._loop, self._owns_loop = loop or asyncio.new_event_loop(), loop is None
        self._tasks: set[asyncio.Task] = set()
        self._news, self._alarm = news or News(), asyncio.Event()
        self._client: SGLangClient | None = None

    @property
    def client(self) -> SGLangClient:
        """Of the server that serves, or served last. Raises ServerGone before there was one."""
        if self._client is None:
            raise ServerGone(f"no {self.server_name} server has been reached yet")
        return self._client

    @property
    def live(self) -> int:
        return len(self._queue) + len(self._streaming)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of that id is live."""
        return request_id in self._queue or request_id in self._streaming

    def failures(self) -> list[tuple[int, str]]:
        failures, self._failures = self._failures, []
        return failures

    def begin(self, work: Coroutine) -> asyncio.Task:
        """Have it done while the engine is stepped."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _admit(self) -> None:
        """Everything queued goes to the server, which has a queue of its own."""
        if self.version is None or self._updating:
            return
        if not self._streaming:
            self._heard_at = clock.now()
        for key in list(self._queue):
            run = self._queue.pop(key)
            self._streaming[key] = run
            run.begin()
            run.task = self.begin(self._stream(run, self.version))

    async def _stream(self, run: Run, version: Version) -> None:
        try:
            finish: dict = {}
            async with contextlib.aclosing(self.client.generate(run.body(version, self.stream_tokens))) as events:
                async for event in events:
                    finish = self._take(run, event) or finish
            self._finish(run, finish)
        except ServerGone as error:
            log.warning("%s", error)
            self._alarm.set()
        except ServerRefuses as error:
            self._fail(run, str(error))
        except Exception as error:
            log.exception("request %d", run.request.id)
            self._fail(run, f"{type(error).__name__}: {error}")

    def _take(self, run: Run, event: dict) -> dict | None:
        """Keep what is new in an event; its finish reason, if it is the last."""
        version = self._names.get(event["meta_info"]["weight_version"])
        if run.pending and run.version != version:
            self._hand_over(run)
        self.generated_tokens += run.take(event, version)
        finish = event["meta_info"]["finish_reason"]
        if finish:
            run.finish_reason = run.end_reached(finish["type"])
        if len(run.pending) >= self.chunk_tokens and not finish:
            self._hand_over(run)
        self._heard_at = clock.now()
        return finish

    def _finish(self, run: Run, finish: dict) -> None:
        kind = finish.get("type")
        if run.finish_reason:
            self.restarts = 0
            self._end(run)
        elif kind == "abort" and run.interrupted:
            self._requeue(run)
        elif not run.ended:
            self._fail(run, f"the {self.server_name} server ended a request: {finish.get('message') or finish}")

    def _requeue(self, run: Run) -> None:
        if not run.ended:
            self._streaming.pop(run.request.id, None)
            self._queue[run.request.id] = run

    def _end(self, run: Run) -> None:
        """Hand over what is left; nothing of this request follows."""
        if run.ended:
            return
        self._hand_over(run)
        run.ended = True
        self._streaming.pop(run.request.id, None)
        self._queue.pop(run.request.id, None)

    def _fail(self, run: Run, why: str) -> None:
        if not run.ended:
            self._end(run)
            self._failures.append((run.request.id, why))

    def _hand_over(self, run: Run) -> None:
        self._chunks += run.hand_over(self.chunk_tokens)
        self._news.set()

    def _hand_over_due(self) -> None:
        if self._ticks.passed(clock.now()):
            for run in self._streaming.values():
                if run.pending:
                    self._hand_over(run)

    # --- interruption -------------------------------------------------------------------------------------------

    async def _abort(self, runs: list[Run]) -> None:
        """Until the server has answered each with all its tokens, has failed, or CANCEL_S are over.

        Raises ServerGone if it does not say that it has taken the abort, which could then hit later requests.
        """
        begun = clock.now()
        waiting = {run.task: run for run in runs if run.task}
        while waiting and (passed_s := clock.now() - begun) < CANCEL_S and not self._alarm.is_set():
            everything = len(waiting) == len(self._streaming) and self._unproven is None
            bodies = [{"abort_all": True}] if everything else [{"rid": run.rid} for run in waiting.values()]
            try:
                left_s = ABORT_S - passed_s
                await asyncio.gather(*(self.client.call("/abort_request", body, left_s) for body in bodies))
            except ServerRefuses as error:
                raise ServerGone(str(error)) from None
            done, _ = await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
            for task in done:
                del waiting[task]
        for task, run in waiting.items():
            log.warning("request %d has not come back; it goes on from what had arrived of it", run.request.id)
            task.cancel()
            if run.interrupted:
                self._requeue(run)

    def _disown(self, wrong: Version) -> None:
        """What runs has to be given back, since some of its tokens may be of these weights."""
        self.version = None
        for run in list(self._streaming.values()):
            if run.task:
                run.task.cancel()
            self._fail(run, DISOWNED)
        self._forget_tokens(wrong)

    def _forget_tokens(self, wrong: Version) -> None:
        """Those that are not handed over yet."""
        ended = [chunk.id for chunk in self._chunks if chunk.version == wrong and chunk.finish_reason]
        self._failures += [(key, DISOWNED) for key in ended]
        self._chunks = [chunk for chunk in self._chunks if chunk.version != wrong]
