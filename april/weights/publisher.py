"""The learner's side of the weights: every version is packed once and sent over each worker's own lane.

    lane: joining -> ready -> sending -> ready ... -> lost

A lost lane is never mended; its worker asks for a new one. `publish` waits a bounded time and trains on.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import zmq
from torch import Tensor

from april import wire
from april.config import Config, ConfigError, WeightsSection, is_loopback
from april.config.sections import AUTO
from april.connections import store
from april.connections.route import own_address
from april.processes import clock
from april.security.allow_list import AllowList, Peer
from april.security.audit import Audit
from april.security.door import Door
from april.security.keys import ALLOW_LIST, load_keys
from april.weights import TRANSPORTS
from april.weights.base import Adapted, Base
from april.weights.canary import Canary
from april.weights.external import ExternalTransport
from april.weights.lane_messages import (
    LANES,
    LaneAlive,
    LaneFailed,
    LaneInvite,
    LaneJoin,
    LaneLoaded,
    LaneManifest,
    LanePosted,
    LaneReady,
)
from april.weights.server_checksums import checksums_in_server
from april.weights.snapshot import Snapshot, buckets, joined, pack, server_buckets, unpack
from april.weights.transport import Link, Transport
from april.wire import limits
from april.wire.version import Version

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SILENCE_S = 3.0
"""a worker that has not been heard of for this long has lost its lane; they speak twice a second"""


VERIFY_EVERY = 20
"""transfers to an inference server after the first, until its weights are compared again"""
MAX_LANES = 2048
"""each has a thread"""
INBOX_MESSAGES = 64
"""a worker that says more at once than its lane takes loses it"""
FROM_WORKERS = (
    LaneJoin, LaneReady, LaneAlive, LanePosted, LaneLoaded, LaneFailed
)  # fmt: skip
ANYBODY = Peer("", "worker", "")
"""who speaks where there are no keys"""


class LaneLost(RuntimeError):
    """The peer did not do what it had to within its deadline."""


@dataclass(eq=False)
class PeerLane:
    name: str
    worker: str
    route: bytes
    backend: str
    last_seen: float
    state: str = "joining"
    acknowledged: Version | None = None
    posted: Version | None = None
    """what its worker is ready for"""
    server_ranks: int = 0
    """of an inference server that takes the worker's place; 0: none does"""
    transfers: int = 0
    key: str = ""
    """CURVE key of the worker, "" without CURVE"""
    base: str = ""
    """checksum of the model that its worker has"""
    inbox: queue.Queue[Any] = field(default_factory=lambda: queue.Queue(INBOX_MESSAGES))
    """LaneReady, LanePosted, LaneLoaded, LaneFailed of this lane"""


def weights_towards(config: Config, broker: str) -> WeightsSection:
    """`[weights]` with its host said: where that is `auto`, workers come on the way that leads to the broker; and with
    its backend, where NCCL cannot be. Raises ConfigError where that way is open to others and there are no keys."""
    weights = config.weights
    if config.devices.share:
        weights = weights.model_copy(update={"backend": "gloo"})
    if weights.host != AUTO:
        return weights
    host, _, port = broker.removeprefix("tcp://").rpartition(":")
    own = own_address(host, int(port))
    if config.security.keys is None and not is_loopback(own):
        raise ConfigError(
            f"key 'weights.host' = 'auto' leads to {own} on the network, where anybody could come in; make keys with "
            "`april keygen KEYS` and set security.keys = 'KEYS'"
        )
    return weights.model_copy(update={"host": own})


class WeightPublisher:
    """Lives in learner rank 0; `address` is where workers ask for a lane."""

    def __init__(self, config: WeightsSection, run: str, device: str, keys: Path | None = None):
        """`keys`: the folder with the learner's key and the allow-list. Raises ConfigError."""
        own = load_keys(keys, "learner")
        allow_list = AllowList(keys / ALLOW_LIST) if keys else None
        self.config = config if config.host != AUTO else config.model_copy(update={"host": LOOPBACK})
        self.bucket_bytes = config.bucket_mb << 20
        self._transport: Transport = TRANSPORTS.find(config.transport)(config)
        self.run = run
        self.device = device
        self._snapshot: Snapshot | None = None
        self._base: Base | None = None
        """of the adapter that is published"""
        self._whole: Snapshot | None = None
        """what was made last of an adapter, for lanes that do not take one"""
        self._making = threading.Lock()
        self._changed = threading.Condition()
        self._lanes: dict[str, PeerLane] = {}
        self._count = 0
        self._lost = 0
        """lanes, since the last publish"""
        self._wrong = 0
        """times that an engine did not hold what it was sent, since then"""
        self._closed = False
        self._store = self._serve_store()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_S * 1000))
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.FROM_PEER.frame_bytes)
        self._socket.setsockopt(zmq.RCVHWM, limits.UPLOAD_QUEUE_MESSAGES)
        self._door = Door(self._context, own, allow_list) if own and allow_list else None
        if self._door:
            self._door.guard(self._socket)
        port = self._socket.bind_to_random_port(f"tcp://{self.config.host}")
        self.address = f"tcp://{self.config.host}:{port}"
        self._audit = Audit()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe()
        self._threads: list[threading.Thread] = []
        self._start_thread("weights-control", self._serve)

    def _serve_store(self) -> dist.TCPStore:
        """Where the two sides of a lane meet."""
        try:
            return store.serve(self.config.host)
        except OSError as error:
            raise ConfigError(
                f"key 'weights.host' = {self.config.host!r} is no address of this machine ({error.strerror}); "
                "give the one under which workers reach learner rank 0"
            ) from None

    def _start_thread(self, name: str, target: Callable, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def publish(
        self, version: Version, weights: Mapping[str, Tensor] | Adapted, canary: Canary | None = None
    ) -> dict[str, float]:
        """Give `version` to all workers, and what the learner says of the canary under it; returns once they have it,
        are lost, or the deadline is over. Of an adapter, a lane whose worker has another model, or none, is sent all
        weights."""
        if not isinstance(weights, Adapted):
            return self._offer(pack(version, weights, canary))
        self._base = weights.base
        return self._offer(pack(version, weights.tensors, canary, weights.adapter))

    def announce(self, version: Version, canary: Canary | None = None) -> None:
        """Have all engines stop for weights that others bring, where the transport leaves that to them. Raises
        RuntimeError for one that has not stopped in time, whose tokens would have a wrong name."""
        assert isinstance(self._transport, ExternalTransport), "announced where weights come over lanes"
        deadline = clock.now() + self.config.publish_deadline_s
        self._transport.expect()
        with self._changed:
            self._snapshot = pack(version, {}, canary)
            self._changed.notify_all()
            while (running := self._running(version)) and clock.now() < deadline:
                self._changed.wait(min(0.1, max(0.0, deadline - clock.now())))
        if running:
            names = ", ".join(sorted(lane.worker for lane in running))
            raise RuntimeError(
                f"{names} still generates {self.config.publish_deadline_s:g} s after {version} was announced "
                "(weights.publish_deadline_s); what it samples while its server changes would have the wrong name"
            )

    def brought(self) -> dict[str, float]:
        """The servers hold what was announced; as `publish` from then on."""
        assert isinstance(self._transport, ExternalTransport) and self._snapshot
        self._transport.arrived()
        return self._offer(self._snapshot)

    def _running(self, version: Version) -> list[PeerLane]:
        """Those that have not stopped for it."""
        return [lane for lane in self._behind(version) if lane.posted != version]

    def _offer(self, snapshot: Snapshot) -> dict[str, float]:
        version, deadline = snapshot.version, clock.now() + self.config.publish_deadline_s
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()
            while self._behind(version) and clock.now() < deadline:
                self._changed.wait(min(0.1, max(0.0, deadline - clock.now())))
            late = self._behind(version)
            reached = sum(lane.acknowledged == version for lane in self._lanes.values())
            lost, self._lost = self._lost, 0
            wrong, self._wrong = self._wrong, 0
        for lane in late:
            within_s, ids = self.config.publish_deadline_s, {"worker": lane.worker, "step": version.step}
            log.warning("worker %s has not loaded %s within %g s", lane.worker, version, within_s, extra=ids)
        return {
            "publish_bytes": snapshot.data.numel(),
            "publish_workers": reached,
            "publish_late": len(late),
            "publish_lost": lost,
            "publish_wrong": wrong,
        }

    def _behind(self, version: Version) -> list[PeerLane]:
        live = [lane for lane in self._lanes.values() if lane.state in ("ready", "sending")]
        return [lane for lane in live if lane.acknowledged != version]

    def close(self, timeout_s: float = 2.0) -> None:
        """End all threads, but for those that are stuck in a lane that has yet to time out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        os.write(self._wake_writer, b"x")
        deadline = clock.now() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - clock.now()))

    # --- control thread: the only one that touches the socket ---------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(500))
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
            while self._socket.poll(0):
                route, *frames = self._socket.recv_multipart(copy=False)
                self._receive(route.bytes, frames, self._door.peer_of(route) if self._door else ANYBODY)
            while not self._outbox.empty():
                route, message = self._outbox.get()
                self._socket.send_multipart([route, *wire.encode(message)])
            if self._door and self._door.watch():
                self._drop_revoked()
            self._drop_silent()
        if self._door:
            self._door.close()
        self._socket.close()
        self._context.term()

    def _receive(self, route: bytes, frames: list, peer: Peer) -> None:
        try:
            message = wire.decode(frames, limits.FROM_PEER, LANES).message
            if peer.role != "worker" or not isinstance(message, FROM_WORKERS):
                raise wire.WireError("not for this peer to send")
        except wire.WireError as error:
            self._audit.say("bad message about weights: %s", error)
            return
        if isinstance(message, LaneJoin):
            self._invite(route, message, peer)
            return
        lane = self._lanes.get(getattr(message, "lane", ""))
        if lane is None or lane.route != route:
            self._outbox.put((route, LaneFailed(message.lane[: limits.TEXT_CHARACTERS], "the lane has ended")))
            return
        lane.last_seen = clock.now()
        if isinstance(message, LaneAlive):
            return
        try:
            lane.inbox.put_nowait(message)
        except queue.Full:
            with self._changed:
                self._lose(lane, "it says too much at once")

    def _invite(self, route: bytes, join: LaneJoin, peer: Peer) -> None:
        """One lane for every request; what the worker had before, or its predecessor of that name, is lost."""
        with self._changed:
            namesakes = [lane for lane in self._lanes.values() if lane.worker == join.name]
            if any(lane.key != peer.key for lane in namesakes):
                return self._audit.say("no lane for another key under the name %s", join.name)
            for lane in namesakes:
                self._lose(lane, "its worker asks for a new lane")
            if len(self._lanes) >= MAX_LANES:
                return self._audit.say("no lane for %s: there are %d", join.name, MAX_LANES)
            self._count += 1
            name = f"w-{self.run}-{join.name}-{self._count}"
            backend = self._backend(join.device)
            lane = PeerLane(
                name,
                join.name,
                route,
                backend,
                clock.now(),
                acknowledged=join.held,
                server_ranks=join.ranks,
                key=peer.key,
                base=join.base,
            )
            self._lanes[name] = lane
        self._start_thread(name, self._run_lane, lane)

    def _backend(self, worker_device: str) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if self.device == worker_device == "cuda" else "gloo"

    def _drop_silent(self) -> None:
        with self._changed:
            for lane in list(self._lanes.values()):
                if lane.state == "ready" and clock.now() - lane.last_seen > SILENCE_S:
                    self._lose(lane, f"silent for {SILENCE_S:g} s")

    def _drop_revoked(self) -> None:
        with self._changed:
            for lane in list(self._lanes.values()):
                if self._door and self._door.allow_list.find(lane.key).role != "worker":
                    self._lose(lane, "its key is off the allow-list")

    def _lose(self, lane: PeerLane, why: str) -> None:
        if lane.state != "lost":
            log.info("lane %s is lost: %s", lane.name, why, extra={"worker": lane.worker})
            self._lost += 1
        lane.state = "lost"
        self._lanes.pop(lane.name, None)
        self._changed.notify_all()

    def _send(self, lane: PeerLane, message: wire.Message) -> None:
        self._outbox.put((lane.route, message))
        os.write(self._wake_writer, b"x")

    # --- one thread a lane: whatever blocks, blocks here ----------------------------------------------------------

    def _run_lane(self, lane: PeerLane) -> None:
        try:
            link = self._join(lane)
            self._set_state(lane, "ready")
            while (snapshot := self._next_snapshot(lane)) is not None:
                self._set_state(lane, "sending")
                self._transfer(lane, link, self._for(lane, snapshot))
                lane.last_seen = clock.now()
                self._set_state(lane, "ready", acknowledged=snapshot.version)
        except (LaneLost, RuntimeError, OSError) as error:
            with self._changed:
                self._lose(lane, str(error))

    def _join(self, lane: PeerLane) -> Link:
        timeout_s = self.config.join_deadline_s
        port = self._store.port
        invite = LaneInvite(lane.name, lane.backend, self.config.host, port, timeout_s)
        self._send(lane, invite)
        link = self._transport.meet(invite, as_learner=True, server_ranks=lane.server_ranks)
        self._await(lane, LaneReady, None, clock.now() + timeout_s)
        return link

    def _next_snapshot(self, lane: PeerLane) -> Snapshot | None:
        """Wait for one that the worker does not have; None when the lane or the publisher has ended."""
        with self._changed:
            while not self._closed and lane.state != "lost":
                if self._snapshot and self._snapshot.version != lane.acknowledged:
                    return self._snapshot
                self._changed.wait(1.0)
        return None

    def _for(self, lane: PeerLane, snapshot: Snapshot) -> Snapshot:
        """As this lane takes it."""
        adapter, base = snapshot.adapter, self._base
        if adapter is None or base is None or lane.base == adapter.base:
            return snapshot
        if not lane.transfers:
            log.info("%s does not take adapters of this model, and is sent all weights", lane.worker)
        with self._making:
            if self._whole is None or self._whole.version != snapshot.version:
                trained = unpack(snapshot.heads, snapshot.data, snapshot.checksum)
                self._whole = pack(snapshot.version, dict(base.with_adapter(adapter, trained)), snapshot.canary)
            return self._whole

    def _transfer(self, lane: PeerLane, link: Link, snapshot: Snapshot) -> None:
        bucket_bytes = self.bucket_bytes
        heads, size = snapshot.heads, snapshot.data.numel()
        expected = self._server_checksums(lane, snapshot)
        manifest = LaneManifest(
            lane.name, snapshot.version, heads, size, bucket_bytes, snapshot.checksum, expected, snapshot.canary,
            snapshot.adapter,
        )  # fmt: skip
        deadline = clock.now() + self.config.transfer_deadline_s
        self._send(lane, manifest)
        self._await(lane, LanePosted, snapshot.version, deadline)
        lane.posted = snapshot.version
        self._set_state(lane, "sending")
        parts: Iterable[Tensor]
        if lane.server_ranks:
            parts = (joined(snapshot, heads) for heads in server_buckets(snapshot.heads, bucket_bytes))
        else:
            parts = buckets(snapshot.data, bucket_bytes)
        link.send(parts, deadline)
        self._await(lane, LaneLoaded, snapshot.version, deadline)

    def _server_checksums(self, lane: PeerLane, snapshot: Snapshot) -> dict[str, str]:
        """What a server says of these weights, where it can be foretold: of the first transfer and every k-th."""
        due = lane.transfers % VERIFY_EVERY == 0
        lane.transfers += 1
        if not due or lane.server_ranks != 1 or lane.backend != "gloo":
            return {}
        return checksums_in_server(unpack(snapshot.heads, snapshot.data, snapshot.checksum))

    def _await(self, lane: PeerLane, kind: type[wire.Message], version: Version | None, deadline: float) -> Any:
        silent_since = clock.now()
        while lane.state != "lost" and not self._closed:
            try:
                message = lane.inbox.get(timeout=min(0.2, max(0.001, deadline - clock.now())))
            except queue.Empty:
                if clock.now() >= deadline:
                    raise LaneLost(f"no {kind.__name__} by the deadline") from None
                if clock.now() - max(lane.last_seen, silent_since) > SILENCE_S:
                    raise LaneLost(f"silent for {SILENCE_S:g} s while {kind.__name__} was due") from None
                continue
            if isinstance(message, LaneFailed):
                self._wrong += message.wrong
                raise LaneLost(message.error)
            if isinstance(message, kind) and version in (None, getattr(message, "version", None)):
                return message
        raise LaneLost("the lane has ended")

    def _set_state(self, lane: PeerLane, state: str, acknowledged: Version | None = None) -> None:
        with self._changed:
            if lane.state == "lost":
                raise LaneLost("the lane has ended")
            lane.state = state
            lane.acknowledged = acknowledged or lane.acknowledged
            self._changed.notify_all()
