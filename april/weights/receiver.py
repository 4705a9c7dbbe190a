"""A worker's side of the weights: a thread that keeps a lane to the learner and stages what arrives.

The worker's own loop takes staged weights between two decode steps, so an update never tears a forward pass:

    receiver.connect(address)
    if staged := receiver.take():
        engine.load_weights(staged.version, staged.tensors)
        receiver.loaded(staged.version)
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import zmq
from torch import Tensor

from april import wire
from april.config import WeightsSection
from april.processes import clock
from april.security.handshake import Handshake
from april.security.keys import Keys
from april.weights import TRANSPORTS
from april.weights.base import Base
from april.weights.canary import Canary
from april.weights.lane_messages import (
    LANES,
    Adapter,
    LaneAlive,
    LaneFailed,
    LaneInvite,
    LaneJoin,
    LaneLoaded,
    LaneManifest,
    LanePosted,
    LaneReady,
)
from april.weights.snapshot import SnapshotError, buckets, unpack
from april.weights.transport import Link, Transport
from april.wire.limits import FROM_BROKER, TEXT_CHARACTERS
from april.wire.version import Version

log = logging.getLogger(__name__)

SPEAK_S = 0.5
"""how often the learner is told that this worker lives"""
NO_REFUSAL = ("", False)
PARTING_MS = 200
"""for the last word to a learner that may be gone"""
INVITATION_S = 5.0
"""ask again after this long without a lane"""


@dataclass(frozen=True)
class Staged:
    version: Version
    tensors: dict[str, Tensor] | None
    """None where the learner will broadcast them to the server as soon as `post` is called"""
    started_at: float
    """when its manifest arrived, unix seconds"""
    manifest: LaneManifest | None = None
    post: Callable[[], None] | None = None
    canary: Canary | None = None
    """what the learner says of it under these weights"""
    checksum: int = 0
    """of all of them"""
    adapter: Adapter | None = None
    """what the tensors are to the weights, where the engine takes them so"""
    brought: "Future[None] | None" = None
    """where others load them into the server after `post` was called: done once they have"""


class InferenceServer(Protocol):
    """What takes a worker's place in its lanes. Both methods are called from the weights thread."""

    ranks: int
    """of its own in the lane, behind the learner's"""
    device: str
    """cpu, cuda"""

    def join(self, invite: LaneInvite) -> None:
        """Build the group. Raises RuntimeError."""

    def leave(self, lane: str) -> None:
        """Drop the group, if it can be dropped."""


class LearnerRefuses(RuntimeError):
    """The learner's publisher has no use for this worker's key; the text says why."""


class WeightReceiver:
    def __init__(
        self,
        config: WeightsSection,
        uid: str,
        name: str,
        device: str,
        keys: Keys | None = None,
        server: InferenceServer | None = None,
        up: Callable[[], bool] = lambda: True,
        base: Base | None = None,
        adapts: Callable[[], bool] = lambda: False,
    ):
        """`up`: whether there is what takes weights at all; without it there is no lane, for which a learner would
        wait; `base`: the model that the worker has, if adapters of it may come in place of weights; `adapts`: whether
        the engine takes an adapter as it comes, so that no weights are made of it here."""
        self.server, self.up, self.base, self.adapts = server, up, base, adapts
        self.config = config
        self.transport: Transport = TRANSPORTS.find(config.transport)(config)
        self.keys = keys
        self.uid, self.name, self.device = uid, name, device
        self._lock = threading.Lock()
        self._staged: Staged | None = None
        self._loaded: Version | None = None
        self.held: Version | None = None
        """what the engine samples from"""
        self._learner = ("", "")
        """address and public key"""
        self._closed = self._forgotten = False
        self._refusal = NO_REFUSAL
        self._posted: LaneManifest | None = None
        self._brought: Future[None] = Future()
        """of the version that others bring now"""
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def connect(self, address: str, key: str = "") -> None:
        """Where the learner's publisher is, and its public key; a new address is a new learner."""
        if address and (address, key) != self._learner:
            self._learner = (address, key)
            self._wake()

    def take(self) -> Staged | None:
        """Weights that have arrived whole and have not been taken."""
        with self._lock:
            staged, self._staged = self._staged, None
        return staged

    @property
    def has_staged(self) -> bool:
        """Whether `take` would return some."""
        with self._lock:
            return self._staged is not None

    def loaded(self, version: Version) -> None:
        """The engine samples from `version` now."""
        with self._lock:
            self._loaded = self.held = version
        self._wake()

    def refuse(self, why: str, wrong: bool = False) -> None:
        """The engine does not take what has arrived, or holds something else (`wrong`): the lane ends, and another is
        asked for after a while."""
        with self._lock:
            self._refusal = why, wrong
        self._wake()

    def emptied(self) -> None:
        """The engine has let go of what it held, and waits for what is published next."""
        with self._lock:
            self._loaded = self.held = None

    def forget(self) -> None:
        """The engine has lost what it held: ask the learner for weights as one who joins."""
        with self._lock:
            self._staged = self._loaded = self.held = None
            self._forgotten = True
        self._wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread, unless it is stuck in a transfer that has yet to time out."""
        self._closed = True
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
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
                socket.close(PARTING_MS)
        context.term()

    def _sleep(self, seconds: float = 1.0) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        if poller.poll(int(seconds * 1000)):
            os.read(self._wake_reader, 4096)

    def post(self, manifest: LaneManifest) -> None:
        """The server is ready for these weights."""
        with self._lock:
            self._posted = manifest
        self._wake()

    def take_posted(self) -> LaneManifest | None:
        with self._lock:
            posted, self._posted = self._posted, None
        return posted

    def staged_by_others(self, manifest: LaneManifest, started_at: float) -> Staged:
        """The name of weights that others load."""
        post, self._brought = partial(self.post, manifest), Future()
        return Staged(manifest.version, None, started_at, manifest, post, manifest.canary, brought=self._brought)

    def take_forgotten(self) -> bool:
        with self._lock:
            forgotten, self._forgotten = self._forgotten, False
        return forgotten

    def take_refusal(self) -> tuple[str, bool]:
        with self._lock:
            refusal, self._refusal = self._refusal, NO_REFUSAL
        return refusal

    def take_loaded(self) -> Version | None:
        with self._lock:
            version, self._loaded = self._loaded, None
        return version

    def drop_announced(self) -> None:
        """Weights that were to come over a lane that has ended."""
        with self._lock:
            if self._staged and self._staged.manifest:
                self._staged = None

    def stage(self, staged: Staged) -> None:
        with self._lock:
            self._staged = staged


class LearnerConnection:
    """The conversation with one learner process, lane after lane."""

    def __init__(self, receiver: WeightReceiver, socket: zmq.Socket, learner: tuple[str, str], handshake: Handshake):
        self.receiver = receiver
        self.socket = socket
        self.learner = learner
        self.handshake = handshake
        self.lane: LaneInvite | None = None
        self.link: Link | None = None
        self._ask_again_at = 0.0

    def run(self) -> None:
        """Until the learner has another address or the receiver is closed. Raises LearnerRefuses."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.receiver._wake_reader, zmq.POLLIN)
        while not self.receiver._closed and self.receiver._learner == self.learner:
            if problem := self.handshake.problem():
                raise LearnerRefuses(problem)
            self._speak()
            ready = dict(poller.poll(int(SPEAK_S * 1000)))
            if self.receiver._wake_reader in ready:
                os.read(self.receiver._wake_reader, 4096)
            if posted := self.receiver.take_posted():
                self._send(LanePosted(posted.lane, posted.version))
                if not self.receiver.transport.brings:
                    self._await_others()
            if (refusal := self.receiver.take_refusal()) != NO_REFUSAL:
                self._fail(*refusal)
                self._ask_again_at = clock.now() + INVITATION_S
            if self.receiver.take_forgotten():
                self.leave()
                self._ask_again_at = 0.0
            if version := self.receiver.take_loaded():
                self._send(LaneLoaded(self.lane.lane if self.lane else "", version))
            while self.socket.poll(0):
                self._receive(self.socket.recv_multipart())

    def _await_others(self) -> None:
        """Until the trainer has said that the weights are there, or is gone."""
        link, brought = self.link, self.receiver._brought
        try:
            if link is None:
                raise RuntimeError("the lane has ended")
            link.receive([], clock.now() + self.receiver.config.transfer_deadline_s)
            brought.set_result(None)
        except (RuntimeError, OSError) as error:
            brought.set_exception(RuntimeError(str(error)))
            self._fail(f"others have not brought the weights: {error}")

    def end(self) -> None:
        """Drop the lane, and tell the learner, which otherwise waits until this worker has been silent for too long."""
        self._fail("its worker has left")

    def leave(self) -> None:
        """Drop the lane, which tells a learner that waits on it at once."""
        if self.lane and self.receiver.server:
            self.receiver.server.leave(self.lane.lane)
            self.receiver.drop_announced()
        self.lane = self.link = None

    def _speak(self) -> None:
        if self.lane and not self.receiver.up():
            self._fail("its server is down")
        if self.lane:
            self._send(LaneAlive(self.lane.lane))
        elif clock.now() >= self._ask_again_at and self.receiver.up():
            self._ask_again_at = clock.now() + INVITATION_S
            receiver, server = self.receiver, self.receiver.server
            device, ranks = (server.device, server.ranks) if server else (receiver.device, 0)
            base = receiver.base.checksum if receiver.base and not server else ""
            self._send(LaneJoin(receiver.uid, receiver.name, device, receiver.held, ranks, base))

    def _send(self, message: wire.Message) -> None:
        """A learner that has been away for so long that no more fits into the queue is another one when it is back."""
        try:
            self.socket.send_multipart(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the learner takes nothing any more; its lane ends")
            self.leave()
            self._ask_again_at = clock.now() + INVITATION_S

    def _receive(self, frames: list) -> None:
        try:
            message = wire.decode(frames, bodies=LANES).message
            if isinstance(message, LaneInvite):
                self._join(message)
            elif isinstance(message, LaneManifest) and self.lane and message.lane == self.lane.lane:
                self._receive_weights(message, self.link)
            elif isinstance(message, LaneFailed) and self.lane and message.lane == self.lane.lane:
                log.info("the learner has ended the lane: %s", message.error)
                self.leave()
                self._ask_again_at = 0.0
        except (wire.WireError, SnapshotError, RuntimeError, OSError) as error:
            log.warning("lane to the learner failed: %s", error)
            self._fail(str(error))
            self._ask_again_at = clock.now() + SPEAK_S if self.receiver.server else 0.0

    def _fail(self, why: str, wrong: bool = False) -> None:
        """Tell the learner why the lane has ended."""
        if self.lane:
            self._send(LaneFailed(self.lane.lane, why[:TEXT_CHARACTERS], wrong))
        self.leave()

    def _join(self, invite: LaneInvite) -> None:
        self.lane, self.link = invite, None
        if self.receiver.server:
            self.receiver.server.join(invite)
            self._send(LaneReady(invite.lane))
            return
        self.link = self.receiver.transport.meet(invite, as_learner=False)
        self._send(LaneReady(invite.lane))

    def _receive_weights(self, manifest: LaneManifest, link: Link | None) -> None:
        started_at = clock.now()
        if not self.receiver.transport.brings:
            self.receiver.stage(self.receiver.staged_by_others(manifest, started_at))
            return
        if self.receiver.server:
            post = partial(self.receiver.post, manifest)
            staged = Staged(manifest.version, None, started_at, manifest, post, manifest.canary, manifest.checksum)
            self.receiver.stage(staged)
            return
        assert link, "a lane that is none of a server's has a link"
        data = torch.empty(manifest.total_bytes, dtype=torch.uint8)
        self._send(LanePosted(manifest.lane, manifest.version))
        deadline = started_at + self.receiver.config.transfer_deadline_s
        link.receive(buckets(data, manifest.bucket_bytes), deadline)
        tensors = unpack(manifest.tensors, data, manifest.checksum)
        adapter = manifest.adapter
        if adapter and not self.receiver.adapts():
            tensors, adapter = self._with_adapter(adapter, tensors), None
        staged = Staged(
            manifest.version, tensors, started_at, canary=manifest.canary, checksum=manifest.checksum, adapter=adapter
        )
        self.receiver.stage(staged)

    def _with_adapter(self, adapter: Adapter, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights. The learner is told meanwhile that this worker lives."""
        base, weights, spoke_at = self.receiver.base, dict[str, Tensor](), clock.now()
        if base is None or base.checksum != adapter.base:
            raise RuntimeError("an adapter has come of a model that this worker does not have")
        for name, tensor in base.with_adapter(adapter, trained):
            weights[name] = tensor
            if self.lane and clock.now() - spoke_at > SPEAK_S:
                self._send(LaneAlive(self.lane.lane))
                spoke_at = clock.now()
        return weights
