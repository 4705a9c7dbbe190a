"""SGLang as an engine: streamed requests to one server over its HTTP API, weights updated in flight.

The engine's event loop runs only while the worker is inside one of its methods, so there is no second thread and
nothing to lock. This module has the interface, weight updates and supervision; `requests.py` has the live requests.
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

from april.util import clock
from april.util.lifetime import restart_delay_s
from april.weights.snapshot import can_predict_checksums, checksums_in_server
from april.weights.source import alone
from april.wire.message import Version
from april.workers.engines.base import CapacityRule, Chunk, EngineError, Request
from april.workers.engines.entry import check_heads, check_request
from april.workers.engines.sglang import weights
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, SGLangClient
from april.workers.engines.sglang.requests import ServerRequests, read_scores, score_body, server_dtype
from april.workers.engines.sglang.run import StepSignal, StreamedRequest
from april.workers.engines.sglang.server import (
    PORTS_TRIED,
    AttachedServer,
    PortLost,
    ServerFailed,
    SGLangServer,
    check_model,
    check_pause,
    check_server,
)

if TYPE_CHECKING:
    import torch

    from april.weights.channel import Adapter, ChannelManifest

log = logging.getLogger(__name__)

Pause = Literal["abort", "retract", "in_place"]
VerifyWeights = Callable[[], Awaitable[None]]

PROBE_INTERVAL_S = 0.5
"""Interval between two probes of the server (s)."""
WORKER_STALL_S = 5.0
"""If the worker has not probed for so long (s), silence of the server meanwhile does not count as a hang."""
PROBE_TIMEOUT_S = 5.0
"""Time the server has to answer a probe (s)."""
VERIFY_EVERY = 20
"""Number of weight updates from one comparison of the server's checksums with those of the sent weights to the next."""


class SGLangEngine(ServerRequests):
    """Implements `Engine` on a server that it starts and restarts, or on an external server at `url`.

    The server must have no other client that generates or changes weights.
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
        push: weights.WeightPush | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        step_signal: StepSignal | None = None,
    ):
        """Blocks until the server serves. Raises ServerFailed.

        `slots`: most requests at a time. `chunk_tokens`, `report_s`: new tokens are returned once there are so many, or
        every so many seconds. `stream_tokens`: tokens per streamed event. `pause`: SGLang's mode for weight updates.
        `stall_s`: a server that has requests and streams nothing for so long counts as hung. `update_s`, `start_s`:
        longest weight update, and absence of an external server (s). `max_restarts`: restarts in a row that finish no
        request. `server`: None: the external one at `url`. `push`: how tensors get into it; None: by `DiskSnapshot`.
        `loop`, `step_signal`: shared by several engines, whose caller closes the loop; None: the engine's own.
        """
        check_pause(pause, stream_tokens)
        self.model_path, self.vocabulary, self.max_context = Path(model_path), vocabulary, max_context
        super().__init__(chunk_tokens, stream_tokens, report_s, loop, step_signal)
        self.slots = slots
        self.pause, self.stall_s, self.update_s, self.max_restarts = pause, stall_s, update_s, max_restarts
        self.ready = self.released = self._holds_base_weights = False
        self.info: dict = {}
        """The server's answer to /server_info."""
        self._push = push or weights.DiskSnapshot(self.model_path)
        self._server, self._api_key = server or AttachedServer(url, start_s), api_key
        self._capacity = CapacityRule(slots)
        self._updates, self._checksums_comparable = 0, False
        self._fatal: EngineError | None = None
        self._suspicion = ""
        try:
            self._loop.run_until_complete(self._start())
        except BaseException:
            self.close()
            raise
        self.begin(self._supervise())

    # --- the interface ------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Number of requests queued in this engine and, by its last report, in the server."""
        return len(self._queue) + min(self._capacity.waiting, len(self._streaming))

    @property
    def capacity(self) -> int:
        return self._capacity.requests if self.ready else 0

    @property
    def kv_tokens(self) -> int | None:
        return self.info.get("max_total_num_tokens")

    def check(self, request: Request, live: Container[int]) -> None:
        """Raise EngineError for a request that can never run on this engine, or whose id is in `live`."""
        check_request(request, self.vocabulary, self.max_context, live)

    def submit(self, request: Request) -> None:
        self.check(request, self)
        self._queue[request.id] = StreamedRequest(request, self.images_of(request))
        self._admit()

    @property
    def busy(self) -> bool:
        """Whether `step` should wait for an event: requests stream, weights are updated, or the server is down."""
        return bool(self._streaming) or self._updating or not self.ready

    def step(self) -> list[Chunk]:
        self._loop.run_until_complete(self._step_signal.wait_for_work(expected=self.busy))
        return self.collect()

    def collect(self) -> list[Chunk]:
        """Return, without waiting, the chunks that are full or end a request, and at every tick (each `report_s`
        seconds) all new tokens. Chunks of a version whose weight check has not ended are held back."""
        self._hand_over_due()
        chunks = [chunk for chunk in self._chunks if chunk.version != self._unverified]
        self._chunks = [chunk for chunk in self._chunks if chunk.version == self._unverified]
        self._step_signal.clear()
        if self._fatal and not chunks:
            raise self._fatal
        return chunks

    def cancel(self, request_id: int) -> list[Chunk]:
        return self.cancel_all([request_id])

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        return self._loop.run_until_complete(self.abort_requests(request_ids))

    async def abort_requests(self, request_ids: Iterable[int]) -> list[Chunk]:
        """`Engine.cancel_all` as a coroutine: end requests and return their remaining chunks."""
        ids = set(request_ids)
        streamed_requests = [self._streaming[key] for key in ids if key in self._streaming]
        if streamed_requests:
            try:
                await self._abort(streamed_requests)
            except ServerGone as error:
                self._mark_lost(str(error))
        for streamed in [*streamed_requests, *(self._queue[key] for key in ids if key in self._queue)]:
            self._end(streamed)
        chunks = [chunk for chunk in self._chunks if chunk.id in ids and chunk.version != self._unverified]
        self._chunks = [chunk for chunk in self._chunks if chunk.id not in ids]
        self._failures = [(key, why) for key, why in self._failures if key not in ids]
        return chunks

    def load_weights(self, version: Version, tensors: "Mapping[str, torch.Tensor]") -> None:
        self._loop.run_until_complete(self.update_weights(version, tensors))

    async def update_weights(
        self, version: Version, tensors: "Mapping[str, torch.Tensor]", verify: VerifyWeights | None = None
    ) -> None:
        """Load weights, `tensors` by name: meanwhile new requests wait, and steps and cancels continue. `verify`: check
        of the loaded weights (None: none). If it raises EngineError, no token of the version is returned.
        """
        self._check_ready()
        checked = await asyncio.to_thread(self._push.check, tensors)
        checksums = await asyncio.to_thread(self._expected_checksums, tensors)
        self._check_ready()
        load = self._push.load(self.client, checked, self._change(version), self.info.get("tp_size", 1))
        self._holds_base_weights = False
        await self._update(version, load, checksums, verify)

    def load_adapter(self, version: Version, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]") -> None:
        self._loop.run_until_complete(self.update_adapter(version, adapter, tensors))

    async def update_adapter(
        self,
        version: Version,
        adapter: "Adapter",
        tensors: "Mapping[str, torch.Tensor]",
        verify: VerifyWeights | None = None,
    ) -> None:
        """Load an adapter, `tensors` by name, on top of the model's base weights. `verify`: as for `update_weights`."""
        self._check_ready()
        load = weights.load_adapter(self.client, self.model_path, adapter, tensors, str(version))
        await self._update(version, load, {}, verify)

    @property
    def takes_adapters(self) -> bool:
        """Whether the server accepts adapters and still holds the base model's weights."""
        return self._holds_base_weights and bool(self.info.get("takes_adapters"))

    async def update_from_broadcast(
        self,
        version: Version,
        manifest: "ChannelManifest",
        post: Callable[[], None],
        verify: VerifyWeights | None = None,
        meet: weights.Meet = alone,
    ) -> None:
        """As `update_weights`, by broadcast: `post()` asks the learner to send, `meet()` awaits the other servers."""
        self._check_ready()
        shapes = {head.name: tuple(head.shape) for part in manifest.parts for head in part.tensors}
        check_heads(self._push.expected, self._push.tied, shapes)
        self._holds_base_weights = False
        load = weights.receive_broadcast(self.client, manifest, post, meet, self._change(version))
        await self._update(version, load, manifest.server_checksums if self._checksums_comparable else {}, verify)

    async def update_from_external(
        self, version: Version, post: Callable[[], None], loaded: Future[None], verify: VerifyWeights | None = None
    ) -> None:
        """As `update_weights`, with weights that a process outside April loads. `post` tells it that the server is
        paused, and `loaded` ends once the weights are in the server."""
        self._check_ready()
        self._holds_base_weights = False
        load = weights.adopt_external_weights(self.client, post, loaded, self._change(version))
        await self._update(version, load, {}, verify)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        if self.version is None:
            raise EngineError("there are no weights to score with; load some")
        try:
            return self._loop.run_until_complete(self.request_score(tokens))
        except ServerGone as error:
            raise EngineError(str(error)) from None

    async def request_score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities of `tokens[1:]` (`Engine.score`) by the server's weights. Also raises ServerGone."""
        return read_scores(
            await self.client.call("/generate", score_body(tokens), self.update_s), tokens, self.vocabulary
        )

    @property
    def dtype(self) -> str:
        """Data type that the server reports for its computation; the quantised type if its weights are quantised."""
        return self.info.get("quantization") or server_dtype(self.info.get("dtype", "auto"), self._declared_dtype)

    def discard_weights(self) -> None:
        if self.version is not None:
            self._disown(self.version)

    def release(self) -> None:
        self._loop.run_until_complete(self.release_async())

    def resume(self) -> None:
        self._loop.run_until_complete(self.resume_async())

    async def release_async(self) -> None:
        """Have the server free its memory on the accelerator; one that is down or fails to do so is killed instead."""
        self.version, self.released = None, True
        if self.ready:
            await self._call_memory_api(weights.release_memory(self.client), "release its accelerator")
        else:
            self._server.kill()

    async def resume_async(self) -> None:
        """Have the server take memory on the accelerator again; one that fails to do so is restarted."""
        self.released = False
        if self.ready:
            await self._call_memory_api(weights.resume_memory(self.client), "acquire its accelerator again")

    async def _call_memory_api(self, call: Coroutine, what: str) -> None:
        try:
            async with asyncio.timeout(self.update_s):
                await call
        except (ServerGone, ServerRefuses, TimeoutError) as error:
            late = f"it has not answered within engine.update_s = {self.update_s:g} s"
            self._mark_lost(f"the {self.server_name} server did not {what}: {str(error) or late}")

    def _check_ready(self) -> None:
        if not self.ready:
            raise EngineError("there is no server to load weights into; try again once the engine is ready")

    def _change(self, version: Version) -> dict:
        return {"weight_version": str(version), "flush_cache": self.pause != "in_place"}

    def _expected_checksums(self, tensors: "Mapping[str, torch.Tensor]") -> dict[str, str]:
        """The server's checksums if it holds these weights; empty if unknown, and in most updates (VERIFY_EVERY)."""
        return checksums_in_server(tensors) if self._checksums_comparable and self._updates % VERIFY_EVERY == 0 else {}

    def make_client(self) -> SGLangClient:
        """A new client of the server, for another thread with its own event loop."""
        return SGLangClient(self.client.url, self._api_key, self.server_name)

    def close(self) -> None:
        self._loop.run_until_complete(self._stop())
        if self._owns_loop:
            self._loop.close()
        self._server.kill()
        self._push.close()

    def suspect(self, why: str) -> None:
        """Report, from any thread, that the server is stuck and has to be restarted."""
        self._suspicion = why

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client:
            await self._client.close()

    # --- weights ------------------------------------------------------------------------------------------------

    async def _update(
        self, version: Version, load: Coroutine, expected: dict[str, str], verify: VerifyWeights | None
    ) -> None:
        """Stop admission, pause the server, await `load`, continue the server in any case, then `verify` the weights.

        `expected`: checksums to compare after loading; {}: none. `verify`: None: no check. Raises EngineError.
        """
        self._updating, self._names[str(version)] = True, version
        self._unverified = version if verify else None
        try:
            async with asyncio.timeout(self.update_s):
                await self._change_weights(load, expected)
                if verify:
                    await self._verify(version, verify)
            self.version, self._updates = version, self._updates + 1
        except (ServerGone, weights.HalfLoaded, TimeoutError) as error:
            why = str(error) or f"an update of the weights took longer than {self.update_s:g} s"
            if self.ready:
                self._mark_lost(why)
            if verify:
                self._forget_tokens(version)
            raise EngineError(why) from None
        finally:
            load.close()
            self._updating, self._unverified = False, None
            self._admit()
            self._step_signal.set()

    async def _verify(self, version: Version, verify: VerifyWeights) -> None:
        try:
            await verify()
        except EngineError:
            self._disown(version)
            raise

    async def _change_weights(self, load: Coroutine, expected: dict[str, str]) -> None:
        if self.pause == "abort" and self._streaming:
            streamed_requests = list(self._streaming.values())
            for streamed in streamed_requests:
                streamed.interrupted = True
            await self._abort(streamed_requests)
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
            raise (weights.HalfLoaded(str(error)) if loaded else error) from None

    async def _compare(self, expected: dict[str, str]) -> None:
        """Raise HalfLoaded if the server's checksums differ from `expected`, those of the sent weights."""
        answer = await self.client.call("/weights_checker", {"action": "checksum"}, self.update_s)
        held = answer["ranks"][0]["checksums"]
        if wrong := [name for name in held if held[name] != expected.get(name)]:
            raise weights.HalfLoaded(
                f"the server holds other weights than it was sent: {wrong[0]} and {len(wrong) - 1} more differ"
            )
        log.info("the server's %d tensors are those that were sent", len(held))

    # --- the server ---------------------------------------------------------------------------------------------

    async def _start(self, again: bool = False) -> None:
        """Start the server, unless it is external, and wait until it serves. `again`: count it as a restart. Raises
        ServerFailed, ServerGone, ServerRefuses."""
        self.restarts += again
        for retries_left in reversed(range(PORTS_TRIED)):
            if self._client:
                await self._client.close()
            if not self._server.alive:
                self._server.spawn()
            self._client = SGLangClient(self._server.url, self._api_key, self.server_name)
            try:
                self._check(await self._server.wait(self._client))
                break
            except PortLost:
                if not retries_left:
                    raise
                log.warning("the %s server's port was taken meanwhile; it is started on another", self.server_name)
        self._last_event_at, self._updates = clock.now(), 0
        self._alarm.clear()
        self._suspicion, self.ready, self._holds_base_weights = "", True, True

    def _check(self, info: dict) -> None:
        """Validate the server's /server_info, and keep its longest context and most requests. Raises ServerFailed."""
        own = json.loads((self.model_path / "config.json").read_bytes())
        self._declared_dtype = str(own.get("dtype") or own.get("torch_dtype"))
        check_server(info)
        check_model(info, own)
        self.info, self._checksums_comparable = info, can_predict_checksums(info, own.get("model_type"))
        if context := info.get("context_length"):
            self.max_context = min(self.max_context, context)
        self._capacity = CapacityRule(min(self.slots, info.get("max_running_requests") or self.slots))

    async def _supervise(self) -> None:
        """Supervise the server until it is given up: note its capacity, and restart one that is dead or hung."""
        try:
            await self._supervise_until_fatal()
        except Exception as error:
            log.exception("supervision of the %s server has failed", self.server_name)
            self._fatal = EngineError(f"supervision of the {self.server_name} server failed: {error!r}")

    async def _supervise_until_fatal(self) -> None:
        while not self._fatal:
            probed_at = clock.now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await self._alarm.wait()
            if clock.now() - probed_at > WORKER_STALL_S:
                self._last_event_at = clock.now()
            if not self.ready:
                if not self.released:
                    await self._restart()
            elif why := await self._diagnose():
                self._mark_lost(why)

    async def _diagnose(self) -> str | None:
        """Probe the server; returns what is wrong with it, or None."""
        if not self._server.alive:
            return f"the {self.server_name} server has died; {self._server.log_tail()}"
        if self._suspicion:
            return self._suspicion
        if self._streaming and not self._updating and clock.now() - self._last_event_at > self.stall_s:
            return f"the {self.server_name} server has streamed nothing for {self.stall_s:g} s"
        asked_at = clock.now()
        try:
            loads = await self.client.call("/v1/loads", deadline_s=PROBE_TIMEOUT_S)
        except (ServerGone, ServerRefuses) as error:
            was_away = clock.now() - asked_at > PROBE_TIMEOUT_S + PROBE_INTERVAL_S
            return None if was_away or (self._streaming and not self._alarm.is_set()) else str(error)
        self._capacity.observe(**{key: loads["loads"][0][key] for key in CapacityRule.OBSERVED})
        if self._alarm.is_set():
            self._alarm.clear()
            for streamed in [
                streamed for streamed in self._streaming.values() if streamed.task and streamed.task.done()
            ]:
                self._fail(streamed, f"the connection to the {self.server_name} server broke")
        return None

    def _mark_lost(self, why: str) -> None:
        """Mark the server as lost: fail all requests, with the tokens that have arrived, and kill it for a restart."""
        log.error("%s", why)
        self.ready, self.version = False, None
        reason = why.partition("\n")[0]
        for streamed in [*self._streaming.values(), *self._queue.values()]:
            if streamed.task:
                streamed.task.cancel()
            self._fail(streamed, reason)
        self._server.kill()

    async def _restart(self) -> None:
        if self.restarts >= self.max_restarts:
            self._fatal = ServerFailed(f"the {self.server_name} server finished nothing in {self.restarts} restarts")
            return
        await asyncio.sleep(restart_delay_s(self.restarts + 1, self.max_restarts))
        if self.released:
            return
        try:
            await self._start(again=True)
        except (ServerFailed, ServerGone, ServerRefuses) as error:
            log.error("%s", error)
        else:
            log.info("the %s server serves again", self.server_name)
