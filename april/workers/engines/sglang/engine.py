"""SGLang as an engine: streamed requests to one server over its HTTP API, weights swapped in flight.

The engine's event loop runs only while the worker is inside one of its methods, so there is no second thread and
nothing to lock. Here are the interface, the changes of weights, and the server's life; `requests.py` has what runs.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from april.processes import clock
from april.processes.restarts import delay_s
from april.weights.server_checksums import can_be_foretold, checksums_in_server
from april.wire.version import Version
from april.workers.engines.base import Chunk, EngineError, Request
from april.workers.engines.capacity import CapacityRule
from april.workers.engines.checks import check_heads, check_request
from april.workers.engines.sglang.adapters import load_adapter
from april.workers.engines.sglang.broadcast import receive
from april.workers.engines.sglang.checks import check_model, check_pause, check_server
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, SGLangClient
from april.workers.engines.sglang.news import News
from april.workers.engines.sglang.occupation import let_go, take_again
from april.workers.engines.sglang.others import take_name
from april.workers.engines.sglang.requests import ServerRequests
from april.workers.engines.sglang.run import Run
from april.workers.engines.sglang.score import score_body, server_dtype, take_scores
from april.workers.engines.sglang.server import PORTS_TRIED, AttachedServer, PortLost, ServerFailed, SGLangServer
from april.workers.engines.sglang.weights import DiskSnapshot, HalfLoaded, WeightPush

if TYPE_CHECKING:
    import torch

    from april.weights.lane_messages import Adapter, LaneManifest

log = logging.getLogger(__name__)

Pause = Literal["abort", "retract", "in_place"]
Prove = Callable[[], Awaitable[None]]

TEND_S = 0.5
"""between two looks at the server"""
AWAY_S = 5.0
"""a worker that has not looked for so long cannot say that the server was silent meanwhile"""
PROBE_S = 5.0
"""a server that is under suspicion has so long to answer"""
VERIFY_EVERY = 20
"""changes of weights that a server takes after its first, until what it holds is compared again with what was sent"""


class SGLangEngine(ServerRequests):
    """Implements `Engine` on a server that it starts and restarts, or on one at `url` that somebody else keeps.

    Either has no other client that generates: its weights are this engine's, and so is everything that runs.
    """

    def __init__(
        self,
        model_path: str | Path,
        vocabulary: int,
        max_context: int,
        slots: int = 64,
        chunk_tokens: int = 512,
        report_s: float = 2.0,
        stream_tokens: int = 32,
        pause: Pause = "abort",
        stall_s: float = 120.0,
        update_s: float = 120.0,
        start_s: float = 600.0,
        max_restarts: int = 3,
        server: SGLangServer | AttachedServer | None = None,
        url: str = "",
        api_key: str = "",
        push: WeightPush | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        news: News | None = None,
    ):
        """Blocks until the server serves. Raises ServerFailed.

        `stream_tokens`: the server sends a request's tokens in events of so many; `stall_s`: a server that streams
        nothing for so long, though it has requests, is hung; `update_s`: longest change of weights; `start_s`: a server
        that others keep may be away for so long; `loop` and `news`: what several engines share; the loop outlives them.
        """
        check_pause(pause, stream_tokens)
        self.model_path, self.vocabulary, self.max_context = Path(model_path), vocabulary, max_context
        super().__init__(chunk_tokens, stream_tokens, report_s, loop, news)
        self.slots = slots
        self.pause, self.stall_s, self.update_s, self.max_restarts = pause, stall_s, update_s, max_restarts
        self.ready = self.released = self._holds_model = False
        self.info: dict = {}
        """what the server says of itself, its /server_info"""
        self._push = push or DiskSnapshot(self.model_path)
        self._server, self._api_key = server or AttachedServer(url, start_s), api_key
        self._capacity = CapacityRule(slots)
        self._updates, self._comparable = 0, False
        self._fatal: EngineError | None = None
        self._suspicion = ""
        try:
            self._loop.run_until_complete(self._start())
        except BaseException:
            self.close()
            raise
        self.begin(self._tend())

    # --- the interface ------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Here, and in the server by its last word."""
        return len(self._queue) + min(self._capacity.waiting, len(self._streaming))

    @property
    def capacity(self) -> int:
        return self._capacity.requests if self.ready else 0

    @property
    def kv_tokens(self) -> int | None:
        return self.info.get("max_total_num_tokens")

    def check(self, request: Request, live: Container[int]) -> None:
        """Raise EngineError for a request that can never run here, or one whose id is `live`."""
        check_request(request, self.vocabulary, self.max_context, live)

    def submit(self, request: Request) -> None:
        self.check(request, self)
        self._queue[request.id] = Run(request)
        self._admit()

    @property
    def busy(self) -> bool:
        """Whether there may be something to hand over soon, or something to see to."""
        return bool(self._streaming) or self._updating or not self.ready

    def step(self) -> list[Chunk]:
        self._loop.run_until_complete(self._news.come(expected=self.busy))
        return self.collect()

    def collect(self) -> list[Chunk]:
        """What a step returns, without waiting for it."""
        self._hand_over_due()
        chunks = [chunk for chunk in self._chunks if chunk.version != self._unproven]
        self._chunks = [chunk for chunk in self._chunks if chunk.version == self._unproven]
        self._news.clear()
        if self._fatal and not chunks:
            raise self._fatal
        return chunks

    def cancel(self, request_id: int) -> list[Chunk]:
        return self.cancel_all([request_id])

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        return self._loop.run_until_complete(self.end_all(request_ids))

    async def end_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        """`cancel_all` for who drives the loop."""
        ids = set(request_ids)
        runs = [self._streaming[key] for key in ids if key in self._streaming]
        if runs:
            try:
                await self._abort(runs)
            except ServerGone as error:
                self._lose(str(error))
        for run in [*runs, *(self._queue[key] for key in ids if key in self._queue)]:
            self._end(run)
        chunks = [chunk for chunk in self._chunks if chunk.id in ids and chunk.version != self._unproven]
        self._chunks = [chunk for chunk in self._chunks if chunk.id not in ids]
        self._failures = [(key, why) for key, why in self._failures if key not in ids]
        return chunks

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        self._loop.run_until_complete(self.take_weights(version, tensors))

    async def take_weights(
        self, version: Version, tensors: "Mapping[str, torch.Tensor]", prove: Prove | None = None
    ) -> None:
        """`load_weights` beside everything else: what is submitted meanwhile waits, steps and cancels go on. A version
        that `prove` raises EngineError for is disowned before anything of it is handed over."""
        self._check_ready()
        checked = await asyncio.to_thread(self._push.check, tensors)
        foretold = await asyncio.to_thread(self._foretell, tensors)
        self._check_ready()
        load = self._push.load(self.client, checked, self._change(version), self.info.get("tp_size", 1))
        self._holds_model = False
        await self._update(version, load, foretold, prove)

    def load_adapter(self, version: Version, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]") -> None:
        self._loop.run_until_complete(self.take_adapter(version, adapter, tensors))

    async def take_adapter(
        self, version: Version, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]", prove: Prove | None = None
    ) -> None:
        """The same with an adapter beside the weights that the server has read from the model's folder."""
        self._check_ready()
        load = load_adapter(self.client, self.model_path, adapter, tensors, str(version))
        await self._update(version, load, {}, prove)

    @property
    def takes_adapters(self) -> bool:
        """The server does, and has no weights but the model's."""
        return self._holds_model and bool(self.info.get("takes_adapters"))

    async def take_broadcast(
        self, version: Version, manifest: "LaneManifest", post: Callable[[], None], prove: Prove | None = None
    ) -> None:
        """The same with weights that the learner broadcasts to the server itself, once `post` has been called."""
        self._check_ready()
        check_heads(self._push.expected, self._push.tied, {head.name: tuple(head.shape) for head in manifest.tensors})
        self._holds_model = False
        load = receive(self.client, manifest, post, self._change(version))
        await self._update(version, load, manifest.server_checksums if self._comparable else {}, prove)

    async def take_from_others(
        self, version: Version, post: Callable[[], None], brought: Future[None], prove: Prove | None = None
    ) -> None:
        """The same with weights that others load into the server between `post` and the end of `brought`. Nothing
        runs in the meantime."""
        self._check_ready()
        self._holds_model = False
        await self._update(version, take_name(self.client, post, brought, self._change(version)), {}, prove)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        if self.version is None:
            raise EngineError("there are no weights to score with; load some")
        try:
            return self._loop.run_until_complete(self.ask_score(tokens))
        except ServerGone as error:
            raise EngineError(str(error)) from None

    async def ask_score(self, tokens: np.ndarray) -> np.ndarray:
        """`score` for who drives the loop, of what the server holds at the moment. Raises ServerGone, too."""
        return take_scores(await self.client.call("/generate", score_body(tokens), self.update_s), tokens)

    @property
    def dtype(self) -> str:
        """As the server says; what it quantises to, where it does."""
        return self.info.get("quantization") or server_dtype(self.info.get("dtype", "auto"), self._declared_dtype)

    def disown(self) -> None:
        if self.version is not None:
            self._disown(self.version)

    def release(self) -> None:
        self._loop.run_until_complete(self.let_go())

    def resume(self) -> None:
        self._loop.run_until_complete(self.take_again())

    async def let_go(self) -> None:
        """`release` for who drives the loop. A server that does not is ended, and so lets go, too."""
        self.version, self.released = None, True
        if self.ready:
            await self._occupy(let_go(self.client), "let go of its accelerator")
        else:
            self._server.kill()

    async def take_again(self) -> None:
        """`resume` for who drives the loop. A server that does not is started again."""
        self.released = False
        if self.ready:
            await self._occupy(take_again(self.client), "take its accelerator again")

    async def _occupy(self, call: Coroutine, what: str) -> None:
        try:
            async with asyncio.timeout(self.update_s):
                await call
        except (ServerGone, ServerRefuses, TimeoutError) as error:
            late = f"it has not answered within engine.update_s = {self.update_s:g} s"
            self._lose(f"the {self.server_name} server did not {what}: {str(error) or late}")

    def _check_ready(self) -> None:
        if not self.ready:
            raise EngineError("there is no server to load weights into; try again once the engine is ready")

    def _change(self, version: Version) -> dict:
        return {"weight_version": str(version), "flush_cache": self.pause != "in_place"}

    def _foretell(self, tensors: "Mapping[str, torch.Tensor]") -> dict[str, str]:
        """What the server must say of these weights, where that can be foretold: of its first and every k-th."""
        return checksums_in_server(tensors) if self._comparable and self._updates % VERIFY_EVERY == 0 else {}

    def make_client(self) -> SGLangClient:
        """For another thread with a loop of its own."""
        return SGLangClient(self.client.url, self._api_key, self.server_name)

    def close(self) -> None:
        self._loop.run_until_complete(self._stop())
        if self._owns_loop:
            self._loop.close()
        self._server.kill()
        self._push.close()

    def suspect(self, why: str) -> None:
        """From another thread: the server is stuck, it has to be brought back."""
        self._suspicion = why

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client:
            await self._client.close()

    # --- weights ------------------------------------------------------------------------------------------------

    async def _update(self, version: Version, load: Coroutine, expected: dict[str, str], prove: Prove | None) -> None:
        """Close admission, pause, load with flush and name of the version, `continue` whatever happens, prove.

        Raises EngineError.
        """
        self._updating, self._names[str(version)] = True, version
        self._unproven = version if prove else None
        try:
            async with asyncio.timeout(self.update_s):
                await self._change_weights(load, expected)
                if prove:
                    await self._prove(version, prove)
            self.version, self._updates = version, self._updates + 1
        except (ServerGone, HalfLoaded, TimeoutError) as error:
            why = str(error) or f"an update of the weights took longer than {self.update_s:g} s"
            if self.ready:
                self._lose(why)
            if prove:
                self._forget_tokens(version)
            raise EngineError(why) from None
        finally:
            load.close()
            self._updating, self._unproven = False, None
            self._admit()
            self._news.set()

    async def _prove(self, version: Version, prove: Prove) -> None:
        try:
            await prove()
        except EngineError:
            self._disown(version)
            raise

    async def _change_weights(self, load: Coroutine, expected: dict[str, str]) -> None:
        if self.pause == "abort" and self._streaming:
            runs = list(self._streaming.values())
            for run in runs:
                run.interrupted = True
            await self._abort(runs)
        call = self.client.call
        await call("/pause_generation", {"mode": "in_place" if self.pause == "in_place" else "retract"}, self.update_s)
        loaded = False
        try:
            try:
                await load
                loaded = True
                if expected:
                    await self._compare(expected)
            finally:
                await call("/continue_generation", {})
        except ServerRefuses as error:
            raise (HalfLoaded(str(error)) if loaded else error) from None

    async def _compare(self, expected: dict[str, str]) -> None:
        """That the server holds what was sent. Raises HalfLoaded."""
        answer = await self.client.call("/weights_checker", {"action": "checksum"}, self.update_s)
        held = answer["ranks"][0]["checksums"]
        if wrong := [name for name in held if held[name] != expected.get(name)]:
            raise HalfLoaded(
                f"the server holds other weights than it was sent: {wrong[0]} and {len(wrong) - 1} more differ"
            )
        log.info("the server's %d tensors are those that were sent", len(held))

    # --- the server ---------------------------------------------------------------------------------------------

    async def _start(self, again: bool = False) -> None:
        """Start the server if it is ours, and wait until it serves. Raises ServerFailed, ServerGone, ServerRefuses."""
        self.restarts += again
        for left in reversed(range(PORTS_TRIED)):
            if self._client:
                await self._client.close()
            if not self._server.alive:
                self._server.spawn()
            self._client = SGLangClient(self._server.url, self._api_key, self.server_name)
            try:
                self._check(await self._server.wait(self._client))
                break
            except PortLost:
                if not left:
                    raise
                log.warning("the %s server's port was taken meanwhile; it is started on another", self.server_name)
        self._heard_at, self._updates = clock.now(), 0
        self._alarm.clear()
        self._suspicion, self.ready, self._holds_model = "", True, True

    def _check(self, info: dict) -> None:
        """Refuse a server that cannot do what this engine needs of it; keep what it says of its sizes."""
        own = json.loads((self.model_path / "config.json").read_bytes())
        self._declared_dtype = str(own.get("dtype") or own.get("torch_dtype"))
        check_server(info)
        check_model(info, own)
        self.info, self._comparable = info, can_be_foretold(info, own.get("model_type"))
        if context := info.get("context_length"):
            self.max_context = min(self.max_context, context)
        self._capacity = CapacityRule(min(self.slots, info.get("max_running_requests") or self.slots))

    async def _tend(self) -> None:
        """Look after the server until it is given up: capacity while it is well, a restart when it is dead or hung."""
        try:
            await self._watch()
        except Exception as error:
            log.exception("nobody looks after the %s server any more", self.server_name)
            self._fatal = EngineError(f"looking after the {self.server_name} server failed: {error!r}")

    async def _watch(self) -> None:
        while not self._fatal:
            looked_at = clock.now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_S):
                    await self._alarm.wait()
            if clock.now() - looked_at > AWAY_S:
                self._heard_at = clock.now()
            if not self.ready:
                if not self.released:
                    await self._bring_back()
            elif why := await self._complaint():
                self._lose(why)

    async def _complaint(self) -> str | None:
        """What is wrong with the server, if anything is."""
        if not self._server.alive:
            return f"the {self.server_name} server has died; {self._server.last_words()}"
        if self._suspicion:
            return self._suspicion
        if self._streaming and not self._updating and clock.now() - self._heard_at > self.stall_s:
            return f"the {self.server_name} server has streamed nothing for {self.stall_s:g} s"
        asked_at = clock.now()
        try:
            loads = await self.client.call("/v1/loads", deadline_s=PROBE_S)
        except (ServerGone, ServerRefuses) as error:
            was_away = clock.now() - asked_at > PROBE_S + TEND_S
            return None if was_away or (self._streaming and not self._alarm.is_set()) else str(error)
        self._capacity.observe(**{key: loads["loads"][0][key] for key in CapacityRule.OBSERVED})
        if self._alarm.is_set():
            self._alarm.clear()
            for run in [run for run in self._streaming.values() if run.task and run.task.done()]:
                self._fail(run, f"the connection to the {self.server_name} server broke")
        return None

    def _lose(self, why: str) -> None:
        """The server is gone: hand over what has arrived, let all requests fail, and have it brought back."""
        log.error("%s", why)
        self.ready, self.version = False, None
        reason = why.partition("\n")[0]
        for run in [*self._streaming.values(), *self._queue.values()]:
            if run.task:
                run.task.cancel()
            self._fail(run, reason)
        self._server.kill()

    async def _bring_back(self) -> None:
        if self.restarts >= self.max_restarts:
            self._fatal = ServerFailed(f"the {self.server_name} server finished nothing in {self.restarts} restarts")
            return
        await asyncio.sleep(delay_s(self.restarts + 1, self.max_restarts))
        if self.released:
            return
        try:
            await self._start(again=True)
        except (ServerFailed, ServerGone, ServerRefuses) as error:
            log.error("%s", error)
        else:
            log.info("the %s server serves again", self.server_name)
