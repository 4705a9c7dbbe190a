"""The worker's weight receiver: a thread that keeps a channel to the learner and stages the weights that arrive.

The worker's main loop takes staged weights between two decode steps, so a forward pass never mixes two versions:

    receiver.connect(address)
    if staged := receiver.take():       # does not wait; None unless a version has arrived since
        engine.load_weights(staged.version, staged.tensors)
        receiver.loaded(staged.version)
"""

import logging
import os
import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq
from torch import Tensor

from april import wire
from april.config import WeightsSection
from april.util import clock
from april.util.lifetime import PartThread, in_background
from april.weights import TRANSPORTS
from april.weights.base import BaseWeights
from april.weights.chains import ChainLinks, not_forwarding
from april.weights.channel import (
    CHANNEL_BODIES,
    CLOSED,
    MAX_SENDERS,
    Adapter,
    ChannelAlive,
    ChannelFailed,
    ChannelFollow,
    ChannelForward,
    ChannelInvite,
    ChannelJoin,
    ChannelLinked,
    ChannelLoaded,
    ChannelManifest,
    ChannelPosted,
    ChannelReady,
    DeltaBase,
    link_name,
)
from april.weights.part_transfer import DeltaRetry, KeptWeights, Packed, receive_delta, receive_whole, unpack_all
from april.weights.snapshot import ReusedBuffers, SnapshotError, joint_checksum
from april.weights.source import StagedWeights, WeightSource
from april.weights.transports import Link, OtherMachine, Transport
from april.wire.limits import FROM_BROKER, MAX_TEXT_CHARACTERS
from april.wire.message import Version
from april.wire.security.access import Handshake
from april.wire.security.keys import Keys

log = logging.getLogger(__name__)

ALIVE_INTERVAL_S = 0.5
"""Interval between two signs of life to the learner."""
CLOSE_LINGER_MS = 200
"""Time limit for sending the last message to a learner that may be gone, milliseconds."""
INVITATION_S = 5.0
"""Interval between two requests for a channel while the learner has not invited the worker, seconds."""


class InferenceServer(Protocol):
    """An inference server, or several, that join a channel in their worker's stead. The weights thread calls `leave`,
    and waits for `join`, which runs in another thread."""

    ranks: int
    """Number of ranks of all servers that are up, and so would join the channel now as its ranks 1 and following."""
    device: str
    """Device of the servers' tensors: cpu | cuda."""

    def join(self, invite: ChannelInvite) -> None:
        """Join the process groups of a channel, all within `invite.timeout_s`. Raises RuntimeError."""

    def leave(self, invite: ChannelInvite) -> None:
        """Leave a channel's process groups; does nothing if the servers no longer answer."""


class LearnerRefuses(RuntimeError):
    """The learner's publisher does not accept this worker's key; the text says why."""


class WeightReceiver(WeightSource):
    """The source of a worker that gets weights over a channel."""

    def __init__(
        self,
        config: WeightsSection,
        uid: str,
        name: str,
        device: str,
        keys: Keys | None = None,
        server: InferenceServer | None = None,
        up: Callable[[], object] = lambda: True,
        base: BaseWeights | None = None,
        adapts: Callable[[], bool] = lambda: False,
    ):
        """`uid`, `name`: of the worker. `device`: cpu | cuda. `up`: whether the engine is up or, with several servers,
        which of them are. While none is up, the worker has no channel, so that no learner waits for it. `base`: the
        worker's base model, if the learner may send adapters of it. `adapts`: whether the engine accepts an adapter
        unmerged; otherwise the receiver merges it."""
        super().__init__()
        self.server, self.up, self.base, self.adapts = server, up, base, adapts
        self.config = config
        self.transport: Transport = TRANSPORTS.find(config.transport)(config)
        self.keys = keys
        self.uid, self.name, self.device = uid, name, device
        self.reports: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        """Reports of the engine to the learner, in order: methods of `LearnerConnection` with their arguments, which
        the receiver's thread calls."""
        self.buffers = ReusedBuffers(self.transport.device)
        self.kept: KeptWeights | None = None
        """The weights received last, if the learner may send deltas to them; only the receiver's thread uses this."""
        self._learner = ("", "")
        """(address, CURVE public key) of the learner's publisher."""
        self._closed = False
        self._puts_off = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = PartThread("weights", self._run)
        self._thread.start()

    def connect(self, address: str, key: str = "") -> None:
        if address and (address, key) != self._learner:
            self._learner = (address, key)
            self._wake()

    def loaded(self, version: Version) -> None:
        super().loaded(version)
        self._report(LearnerConnection.tell_loaded, version)

    def put_off(self, puts_off: bool) -> None:
        """Tell the learner whether the engine puts off loading the weights that have arrived."""
        if puts_off != self._puts_off:
            self._puts_off = puts_off
            self._wake()

    def refuse(self, why: str, wrong: bool = False) -> None:
        """Tell the learner that the engine does not accept the weights or, with `wrong`, holds other weights. The
        channel ends, and the worker asks for another one after a while."""
        self._report(LearnerConnection.tell_refused, why, wrong)

    def forget(self) -> None:
        super().forget()
        self._report(LearnerConnection.ask_again)

    def close(self, timeout_s: float = 2.0) -> None:
        self._closed = True
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_writer = CLOSED

    def _report(self, tell: Callable[..., None], *arguments: Any) -> None:
        self.reports.put((tell, arguments))
        self._wake()

    def _wake(self) -> None:
        if self._wake_writer != CLOSED:
            os.write(self._wake_writer, b"x")

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        while not self._closed:
            address, key = learner = self._learner
            if not address:
                self._sleep()
                continue
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, FROM_BROKER.frame_bytes)
            handshake = Handshake(socket, self.keys if key else None, key)
            connection = LearnerConnection(self, socket, learner, handshake)
            try:
                socket.connect(address)
                connection.run()
            except zmq.ZMQError as error:
                log.error("the learner's address %r is not one (%s)", address, error)
                self._sleep()
            except LearnerRefuses as error:
                log.error("the learner at %s does not let this worker in: %s", address, error)
                self._sleep(INVITATION_S)
            finally:
                connection.end()
                handshake.close()
                socket.close(CLOSE_LINGER_MS)
        context.term()

    def _sleep(self, seconds: float = 1.0) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        if poller.poll(int(seconds * 1000)):
            os.read(self._wake_reader, 4096)

    def stage_for_server(
        self, manifest: ChannelManifest, started_at: float, externally_loaded: "Future[None] | None"
    ) -> None:
        """Stage weights that the server gets directly, once `StagedWeights.post` has been called: from the learner, or
        from the trainer, which `externally_loaded` then tells. `started_at`: arrival of the manifest (Unix time, s)."""
        post = partial(self._report, LearnerConnection.tell_ready, manifest, externally_loaded)
        self.stage(
            StagedWeights(
                manifest.version,
                None,
                started_at,
                manifest,
                post,
                manifest.canary,
                joint_checksum(manifest.parts),
                externally_loaded=externally_loaded,
            )
        )

    def drop_announced(self) -> None:
        """Drop weights that are staged for the server but not sent yet, once the channel that would send them has
        ended."""
        with self._lock:
            if self._staged and self._staged.manifest:
                self._staged = None


class LearnerConnection:
    """The connection to one learner process, over which one channel after the other is built."""

    def __init__(self, receiver: WeightReceiver, socket: zmq.Socket, learner: tuple[str, str], handshake: Handshake):
        self.receiver = receiver
        self.socket = socket
        self.learner = learner
        self.handshake = handshake
        self.invite: ChannelInvite | None = None
        self.links: list[Link] = []
        """The channel's links, one to each rank of the learner that sends; none if a server has joined instead."""
        self.chain = ChainLinks(receiver.transport)
        self._put_back: list[list[bytes]] = []
        """Messages that arrived while a version was being received, to be handled after it."""
        self._ask_again_at = 0.0
        self._up: object = None
        """Result of `receiver.up()` (whether the engine is up, or which servers) at the last request for a channel."""
        self._retry = DeltaRetry()

    def run(self) -> None:
        """Serve until the learner's address changes or the receiver is closed. Raises LearnerRefuses."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.receiver._wake_reader, zmq.POLLIN)
        while not self.receiver._closed and self.receiver._learner == self.learner:
            if problem := self.handshake.problem():
                raise LearnerRefuses(problem)
            self._send_sign_of_life()
            ready = dict(poller.poll(int(ALIVE_INTERVAL_S * 1000)))
            if self.receiver._wake_reader in ready:
                os.read(self.receiver._wake_reader, 4096)
            while not self.receiver.reports.empty():
                tell, arguments = self.receiver.reports.get()
                tell(self, *arguments)
            while self._put_back or self.socket.poll(0):
                self._receive(self._put_back.pop(0) if self._put_back else self.socket.recv_multipart())

    def tell_ready(self, manifest: ChannelManifest, externally_loaded: "Future[None] | None") -> None:
        """Tell the learner that the engine is ready for the weights of `manifest`. `externally_loaded`: a future if the
        trainer loads the weights, else None; this call then waits for the trainer, and sets the future: to None once
        they are loaded, to an error if the learner is gone or late."""
        self._send(ChannelPosted(manifest.channel, manifest.version))
        if externally_loaded:
            self._await_external_load(externally_loaded)

    def tell_loaded(self, version: Version) -> None:
        """Tell the learner that the engine samples from `version` now."""
        self._send(ChannelLoaded(self.invite.channel if self.invite else "", version, self._digest_kept(version)))

    def tell_refused(self, why: str, wrong: bool) -> None:
        """End the channel because the engine refuses the weights, for the reason `why`, and ask for another one after a
        while. `wrong`: the engine holds other weights than it was sent."""
        self._fail(why, wrong)
        self.receiver.kept = None
        self._ask_again_at = clock.now() + INVITATION_S

    def ask_again(self) -> None:
        """Drop the channel to the learner, and ask it for another one at once."""
        self.leave()
        self._ask_again_at = 0.0

    def _await_external_load(self, loaded: "Future[None]") -> None:
        links = self.links
        try:
            if not links:
                raise RuntimeError("the channel has ended")
            links[0].receive([], clock.now() + self.receiver.config.transfer_deadline_s)
            loaded.set_result(None)
        except (RuntimeError, OSError) as error:
            loaded.set_exception(RuntimeError(str(error)))
            self._fail(f"the trainer has not loaded the weights: {error}")

    def end(self) -> None:
        """Drop the channel, and tell the learner, which would otherwise wait until the worker counts as silent."""
        self._fail("its worker has left")

    def leave(self) -> None:
        """Drop the channel; closing it also wakes a learner that waits for the worker."""
        if self.invite and self.receiver.server:
            self.receiver.server.leave(self.invite)
            self.receiver.drop_announced()
        for link in self.links:
            link.close()
        self.chain.close()
        self.invite, self.links = None, []

    def _send_sign_of_life(self) -> None:
        up = self.receiver.up()
        if self.invite and not (up == self._up if self.receiver.server else up):
            self._fail("its servers have changed" if up else "its server is down")
            self._ask_again_at = 0.0
        if self.invite:
            self._send_alive()
        elif clock.now() >= self._ask_again_at and up:
            self._up, self._ask_again_at = up, clock.now() + INVITATION_S
            receiver, server = self.receiver, self.receiver.server
            device, ranks = (server.device, server.ranks) if server else (receiver.device, 0)
            base = receiver.base.checksum if receiver.base and not server else ""
            held = receiver.held
            keeps = self._digest_kept(held)
            self._send(ChannelJoin(receiver.uid, receiver.name, device, held, ranks, base, keeps))

    def _send(self, message: wire.Message) -> None:
        """Queue a message to the learner. If the queue is full, the learner is considered gone, and the channel
        ends."""
        try:
            self.socket.send_multipart(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the learner accepts no more messages; its channel ends")
            self.leave()
            self._ask_again_at = clock.now() + INVITATION_S

    def _receive(self, frames: list) -> None:
        try:
            message = wire.decode(frames, bodies=CHANNEL_BODIES).message
            if isinstance(message, ChannelInvite):
                self._join(message)
            elif self.invite is None or getattr(message, "channel", "") != self.invite.channel:
                return
            elif isinstance(message, ChannelManifest):
                self._receive_weights(message)
            elif isinstance(message, ChannelForward):
                self.chain.forward_to(message.invite)
            elif isinstance(message, ChannelFollow):
                self._follow(message.invite)
            elif isinstance(message, ChannelFailed):
                log.info("the learner has ended the channel: %s", message.error)
                self.ask_again()
        except OtherMachine as error:
            log.error("no weights for this worker: %s", error)
            self.tell_refused(str(error), wrong=False)
        except (wire.WireError, SnapshotError, RuntimeError, OSError) as error:
            log.warning("channel to the learner failed: %s", error)
            self._fail(str(error))
            self._ask_again_at = clock.now() + ALIVE_INTERVAL_S if self.receiver.server else 0.0

    def _fail(self, why: str, wrong: bool = False) -> None:
        """End the channel and tell the learner why. `wrong`: the engine holds other weights than it was sent."""
        if self.invite:
            self._send(ChannelFailed(self.invite.channel, why[:MAX_TEXT_CHARACTERS], wrong))
        self.leave()

    def _join(self, invite: ChannelInvite) -> None:
        self.invite, self.links = invite, []
        if self.receiver.server:
            if self.receiver.up() != self._up:
                raise RuntimeError("its servers have changed")
            joining = in_background(self.receiver.server.join, invite)
            self._wait_alive([joining])
            joining.result()
        else:
            names = (link_name(invite.channel, sender) for sender in range(min(invite.senders, MAX_SENDERS)))
            invites = [msgspec.structs.replace(invite, channel=name) for name in names]
            meeting = [in_background(self.receiver.transport.meet, own, False) for own in invites]
            self._wait_alive(meeting)
            self.links = [met.result() for met in meeting if not met.exception()]
            for met in meeting:
                met.result()
        self._send(ChannelReady(invite.channel))

    def _follow(self, invite: ChannelInvite) -> None:
        """Connect to the worker before this one in its chain, and tell the learner whether that succeeded."""
        channel = self.invite.channel if self.invite else ""
        links = self.chain.follow(invite)

        def tell(connection: "LearnerConnection", error: str) -> None:
            connection._send(ChannelLinked(channel, invite.channel, error[:MAX_TEXT_CHARACTERS]))

        def report() -> None:
            wait(links)
            errors = [str(link.exception()) for link in links if link.exception()]
            self.receiver._report(tell, " ".join(errors))

        in_background(report)

    def _wait_alive(self, work: Collection["Future[Any]"]) -> None:
        """Wait until all futures in `work` are done; signs of life are sent to the learner meanwhile."""
        while wait(work, ALIVE_INTERVAL_S).not_done:
            self._send_alive()
            if self.chain.receives and self.socket.poll(0):
                self._obey_end()

    def _obey_end(self) -> None:
        """Receive a message. Raises RuntimeError if the message is that the learner has ended the channel, as it does
        when a worker before this one is lost while it forwards. Other messages are kept to be handled later."""
        frames = self.socket.recv_multipart()
        message = wire.decode(frames, bodies=CHANNEL_BODIES).message
        if isinstance(message, ChannelFailed) and self.invite and message.channel == self.invite.channel:
            raise RuntimeError(message.error)
        self._put_back.append(frames)

    def _receive_weights(self, manifest: ChannelManifest) -> None:
        started_at = clock.now()
        by_trainer = not self.receiver.transport.carries_weights
        if by_trainer or self.receiver.server:
            self.receiver.stage_for_server(manifest, started_at, Future() if by_trainer else None)
            return
        links = self.chain.upstream if manifest.from_upstream else self.links
        if not 1 <= len(manifest.parts) <= len(links):
            raise SnapshotError(f"{len(manifest.parts)} parts are announced over {len(links)} links")
        base, self.receiver.kept = self.receiver.kept, None  # dropped before whole weights take as much memory
        if manifest.delta_to is None:
            base = None
        elif not base or base.name != manifest.delta_to:
            raise SnapshotError(f"a delta to {manifest.delta_to.version} is announced, which this worker does not keep")
        try:
            parts = self._receive_parts(links, manifest, base, started_at + self.receiver.config.transfer_deadline_s)
        except (RuntimeError, OSError) as error:
            if base:
                self._retry.failed(base.name, error)
            raise
        keeps = self._retry.takes_next(bool(base))
        del base
        adapter, name = manifest.adapter, DeltaBase(manifest.version, joint_checksum(manifest.parts))
        if keeps and manifest.may_follow and self.receiver.config.delta != "off":
            self.receiver.kept, tensors = KeptWeights.lend(name, parts)
        else:
            tensors = unpack_all(parts)
        if adapter and not self.receiver.adapts():
            tensors, adapter = self._with_adapter(adapter, tensors), None
        staged = StagedWeights(
            manifest.version, tensors, started_at, canary=manifest.canary, digest=name.digest, adapter=adapter,
        )  # fmt: skip
        self.receiver.stage(staged)

    def _receive_parts(
        self, links: Sequence[Link], manifest: ChannelManifest, base: KeptWeights | None, deadline: float
    ) -> list[Packed]:
        """Receive all parts of a version at the same time, as deltas to `base` if given, and forward them if the
        manifest says so; signs of life are sent meanwhile. Raises RuntimeError or OSError once no link receives any
        more."""
        size, buffers, pending = manifest.bucket_bytes, self.receiver.buffers, list[tuple[Any, ...]]()
        for sender, (link, part) in enumerate(zip(links, manifest.parts, strict=False)):
            forwarding = self.chain.forwarding(sender, deadline) if manifest.forwards else not_forwarding()
            if base:
                pending.append((receive_delta, link, part, size, base, buffers, deadline, forwarding))
            else:
                data = buffers.take(part.total_bytes)
                pending.append((receive_whole, link, part, size, data, deadline, forwarding))
        self._send(ChannelPosted(manifest.channel, manifest.version))
        receiving = [in_background(*work) for work in pending]
        self.chain.receives = manifest.from_upstream
        try:
            self._wait_alive(receiving)
        finally:
            self.chain.receives = False
        return [received.result() for received in receiving]

    def _digest_kept(self, version: Version | None) -> str:
        """Checksum of `version` if the worker keeps it for deltas, otherwise ""."""
        kept = self.receiver.kept
        return kept.name.digest if kept and kept.name.version == version else ""

    def _send_alive(self) -> None:
        if self.invite:
            self._send(ChannelAlive(self.invite.channel, self.receiver._puts_off))

    def _with_adapter(self, adapter: Adapter, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The complete weights, merged from an adapter and the base model; signs of life are sent meanwhile. Raises
        RuntimeError if the adapter is for another base model."""
        base, weights, last_alive_at = self.receiver.base, dict[str, Tensor](), clock.now()
        if base is None or base.checksum != adapter.base:
            raise RuntimeError("the adapter belongs to a base model that this worker does not have")
        for name, tensor in base.with_adapter(adapter, trained):
            weights[name] = tensor
            if clock.now() - last_alive_at > ALIVE_INTERVAL_S:
                self._send_alive()
                last_alive_at = clock.now()
        return weights
