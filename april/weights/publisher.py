"""The learner's weight publisher: keeps a separate channel to each worker, and sends every version over it. Where other
ranks of the learner hold parts of the version, they send these (`parts.py`).

    channel state: joining -> ready -> sending -> ready ... -> lost

A lost channel is never repaired; its worker asks for a new one. `publish` waits a bounded time, then training goes on.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import Tensor

from april import wire
from april.config import WeightsSection
from april.config.section import AUTO
from april.util import clock
from april.util.lifetime import PartThread
from april.weights import TRANSPORTS
from april.weights.base import AdapterWeights
from april.weights.canary import Canary
from april.weights.chains import Chains, Claim, forwarded_bytes
from april.weights.channel import (
    ChannelAlive,
    ChannelFailed,
    ChannelInvite,
    ChannelJoin,
    ChannelLinked,
    ChannelLoaded,
    ChannelLost,
    ChannelManifest,
    ChannelPosted,
    ChannelReady,
    DeltaBase,
    WeightChannel,
    forget_keys,
    serve_store,
)
from april.weights.merged import MergedSnapshots
from april.weights.part_transfer import DeltaBases, as_sent, copies_sent, delta_base_for, expected_in_server, send_part
from april.weights.parts import CloseLink, HoldPart, OpenLink, PartCommands, SendPart, WithdrawPart
from april.weights.publisher_socket import PublisherSocket
from april.weights.snapshot import ReusedBuffers, Snapshot, pack
from april.weights.transports import ExternalTransport, Link, Transport
from april.wire import limits
from april.wire.message import Version
from april.wire.security.allow_list import KeyOwner

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SILENCE_S = 3.0
"""Seconds of silence after which a worker loses its channel; workers send a sign of life every 0.5 seconds."""
MAX_CHANNELS = 2048
"""Maximum number of channels at a time; each channel has a thread."""


class WeightPublisher:
    """Publishes weights from learner rank 0; workers ask for channels at `address`."""

    def __init__(self, config: WeightsSection, run: str, device: str, keys: Path | None = None, broker: str = ""):
        """`run`: identifier of the run. `device`: cpu | cuda. `keys`: folder with the learner's key and the allow-list;
        None: no keys. `broker`: address of the broker; if it is a Unix socket, the publisher listens at one in the same
        folder, otherwise on TCP. Raises ConfigError."""
        self.config = config if config.host != AUTO else config.model_copy(update={"host": LOOPBACK})
        self.bucket_bytes = config.bucket_mb << 20
        self._transport: Transport = TRANSPORTS.find(config.transport)(config)
        self.run = run
        self.device = device
        self._snapshot: Snapshot | None = None
        self._bases = DeltaBases(config.delta)
        self._buffers = ReusedBuffers(self._transport.device, stay=True)
        self._ranks: PartCommands | None = None
        """Commands to the ranks that hold the other parts of each version; None while rank 0 holds all."""
        self._senders = 1
        self._merged = MergedSnapshots()
        self._changed = threading.Condition()
        self._channels: dict[str, WeightChannel] = {}
        self._count = 0
        self._lost = 0
        """Number of channels lost since the last publish."""
        self._wrong = 0
        """Number of channels lost since the last publish because the engine did not hold the weights that it was
        sent."""
        self._closed = False
        self._store = serve_store(self.config.host)
        self._socket = PublisherSocket(self.config.host, keys, broker, self._receive, self._tick)
        self.address = self._socket.address
        self._chains = Chains(config.channel_size if self._transport.forwards else 1, self._send)
        self._threads: list[threading.Thread] = [self._socket.thread]
        self._socket.start()

    def _start_thread(self, name: str, target: Callable, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = PartThread(name, target, *arguments)
        self._threads.append(thread)
        thread.start()

    def share(self, ranks: PartCommands, senders: int) -> None:
        """From now on publish each version in `senders` parts, one per rank of the learner; `ranks`: commands to all
        ranks but rank 0. Open channels are closed as lost, so that their workers ask for new ones with a link to each
        rank."""
        with self._changed:
            self._ranks, self._senders = ranks, senders
            for channel in list(self._channels.values()):
                self._lose(channel, "the learner's other ranks send, too")
            self._lost = 0

    def drain(self) -> None:
        """Wait until each worker has loaded the last version, puts that off or is lost, and at most for
        `weights.transfer_deadline_s`."""
        with self._changed:
            if self._snapshot:
                self._wait_for(self._awaited, self._snapshot, clock.now() + self.config.transfer_deadline_s)

    @property
    def newest(self) -> Snapshot | None:
        """Rank 0's part of the newest version; None before the first, and after `withdraw` until the next is
        published."""
        return self._snapshot

    def send_alone(self, newest: Snapshot | None) -> None:
        """From now on rank 0 sends all of each version, beginning with `newest` (None: with the next published).
        Channels that exist are closed as lost, so that their workers ask for new ones."""
        with self._changed:
            self._senders = 1
            for channel in list(self._channels.values()):
                self._lose(channel, "rank 0 sends all weights")
            self._snapshot = newest and self._bases.followed_by(newest, ())
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Begin no transfer of the last version any more, so that its memory can be used for the next one."""
        with self._changed:
            self._snapshot = None
            self._bases.release()
            if self._ranks:
                self._ranks.tell(WithdrawPart())

    def publish(
        self, version: Version, weights: Mapping[str, Tensor] | AdapterWeights | Snapshot, canary: Canary | None = None
    ) -> dict[str, float]:
        """Send `version` to all workers. Returns figures by name once no worker is awaited any more, because it has
        loaded the version, puts that off or is lost, and at the latest after `weights.publish_deadline_s`.

        `weights`: all of them, an adapter, or rank 0's part; with an adapter, workers without the same base model are
        sent complete weights. `canary`: a fixed text with the learner's log-probabilities under this version, by which
        workers check their engines; None: they do not.
        """
        if isinstance(weights, Snapshot):
            return self._offer(replace(weights, canary=canary))
        with self._changed:  # the next version takes its memory
            self._snapshot = None
            self._bases.release()
        if not isinstance(weights, AdapterWeights):
            return self._offer(pack(version, weights, canary, take=self._buffers.take))
        self._merged.base = weights.base
        return self._offer(pack(version, weights.tensors, canary, weights.adapter))

    def announce(self, version: Version, canary: Canary | None = None) -> None:
        """Announce a version that the trainer itself loads into the engines' servers, and wait until all engines have
        stopped. `canary`: as in `publish`, a fixed text by which workers check their engines; None: no check.

        Raises RuntimeError if an engine has not stopped by `weights.publish_deadline_s`: the engine's tokens would be
        attributed to a wrong version.
        """
        assert isinstance(self._transport, ExternalTransport), "announced although the channels carry weights"
        deadline = clock.now() + self.config.publish_deadline_s
        self._transport.expect()
        with self._changed:
            running = self._wait_for(self._running, pack(version, {}, canary), deadline)
        if running:
            names = ", ".join(sorted(channel.worker for channel in running))
            raise RuntimeError(
                f"{names} still generates {self.config.publish_deadline_s:g} s after {version} was announced "
                "(weights.publish_deadline_s); what it samples while its server changes would have the wrong name"
            )

    def externally_loaded(self) -> dict[str, float]:
        """Report that the servers hold the version of the last `announce`, and have the workers take it over; returns
        figures by name, as `publish` does."""
        assert isinstance(self._transport, ExternalTransport) and self._snapshot
        self._transport.arrived()
        return self._offer(self._snapshot)

    def _running(self, version: Version) -> list[WeightChannel]:
        """Open channels whose worker has not said yet that its engine has stopped to load `version`."""
        return [channel for channel in self._behind(version) if channel.posted != version]

    def _offer(self, snapshot: Snapshot) -> dict[str, float]:
        """Publish a snapshot, and wait until each worker has loaded it, puts it off or is lost, at most for
        `weights.publish_deadline_s`; returns figures by name, such as `publish_workers`, which have loaded it."""
        version, deadline = snapshot.version, clock.now() + self.config.publish_deadline_s
        with self._changed:
            snapshot = self._bases.followed_by(snapshot, self._channels.values())
            late = self._wait_for(self._awaited, snapshot, deadline)
            reached = [channel for channel in self._channels.values() if channel.acknowledged == version]
            lost, self._lost = self._lost, 0
            wrong, self._wrong = self._wrong, 0
        for channel in late:
            within_s, ids = self.config.publish_deadline_s, {"worker": channel.worker, "step": version.step}
            log.warning("worker %s has not loaded %s within %g s", channel.worker, version, within_s, extra=ids)
        return {
            "publish_bytes": sum(part.total_bytes for part in snapshot.parts),
            "publish_sent_bytes": sum(channel.sent_bytes for channel in reached),
            "publish_workers": len(reached),
            "publish_deltas": sum(channel.was_delta for channel in reached),
            "publish_late": len(late),
            "publish_lost": lost,
            "publish_wrong": wrong,
        }

    def _wait_for(
        self, pending: Callable[[Version], list[WeightChannel]], snapshot: Snapshot, deadline: float
    ) -> list[WeightChannel]:
        """Offer a snapshot to all channels, and wait until `pending(version)` returns no channels or the `deadline` has
        passed (Unix time, seconds); returns its last result. Called with `_changed` held."""
        self._snapshot = snapshot
        self._changed.notify_all()
        while (still := pending(snapshot.version)) and clock.now() < deadline:
            self._changed.wait(min(0.1, max(0.0, deadline - clock.now())))
        return still

    def _behind(self, version: Version) -> list[WeightChannel]:
        """Open channels whose worker has not loaded `version` yet."""
        return [channel for channel in self._channels.values() if channel.is_open and channel.acknowledged != version]

    def _awaited(self, version: Version) -> list[WeightChannel]:
        """Open channels whose worker is still to load `version`, unless it puts that off."""
        return [channel for channel in self._behind(version) if not channel.puts_off]

    def close(self, timeout_s: float = 2.0) -> None:
        """End all threads; wait at most `timeout_s` in all, and leave those that are still blocked in a channel."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._socket.close()
        deadline = clock.now() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - clock.now()))
        if not any(thread.is_alive() for thread in self._threads):
            self._socket.free()

    # --- called in the socket's thread ----------------------------------------------------------------------------

    def _tick(self) -> None:
        with self._changed:
            for channel in list(self._channels.values()):
                if channel.state == "ready" and clock.now() - channel.last_seen > SILENCE_S:
                    self._lose(channel, f"silent for {SILENCE_S:g} s")
                elif not self._socket.allows(channel.key):
                    self._lose(channel, "its key is off the allow-list")

    def _receive(self, route: bytes, message: wire.Message, peer: KeyOwner) -> None:
        if isinstance(message, ChannelJoin):
            self._invite(route, message, peer)
            return
        name = getattr(message, "channel", "")
        channel = self._channels.get(name)
        if channel is None or channel.route != route:
            self._socket.send(route, ChannelFailed(name[: limits.MAX_TEXT_CHARACTERS], "the channel has ended"))
            return
        channel.last_seen = clock.now()
        if isinstance(message, ChannelAlive):
            return self._note_alive(channel, message)
        if isinstance(message, ChannelLinked):
            with self._changed:
                return self._chains.note_linked(channel, message)
        try:
            channel.inbox.put_nowait(message)
        except queue.Full:
            with self._changed:
                self._lose(channel, "it sends too many messages at once")

    def _note_alive(self, channel: WeightChannel, message: ChannelAlive) -> None:
        if channel.puts_off != message.puts_off:
            with self._changed:
                channel.puts_off = message.puts_off
                self._changed.notify_all()

    def _invite(self, route: bytes, join: ChannelJoin, peer: KeyOwner) -> None:
        """Open a new channel for a worker; an earlier channel of a worker of the same name is closed as lost."""
        with self._changed:
            namesakes = [channel for channel in self._channels.values() if channel.worker == join.name]
            if any(channel.key != peer.key for channel in namesakes):
                return self._socket.audit.warn("no channel for another key under the name %s", join.name)
            for channel in namesakes:
                self._lose(channel, "its worker asks for a new channel")
            if len(self._channels) >= MAX_CHANNELS:
                return self._socket.audit.warn("no channel for %s: there are %d", join.name, MAX_CHANNELS)
            self._count += 1
            name = f"w-{self.run}-{join.name}-{self._count}"
            backend = self._backend(join.device)
            made = (name, join.name, route, backend, clock.now())
            channel = WeightChannel(*made, acknowledged=join.held, server_ranks=join.ranks, key=peer.key)
            channel.base, channel.digest, channel.senders = join.base, join.digest, self._senders
            if self._ranks and join.base == self._ranks.adapter_base:
                channel.senders = 1
            self._channels[name] = channel
        self._start_thread(name, self._run_channel, channel)

    def _backend(self, worker_device: str) -> str:
        auto = "nccl" if self.device == worker_device == "cuda" else "gloo"
        return auto if self.config.backend == AUTO else self.config.backend

    def _lose(self, channel: WeightChannel, why: str, fault: bool = False) -> None:
        if channel.state != "lost":
            log.info("channel %s is lost: %s", channel.name, why, exc_info=fault, extra={"worker": channel.worker})
            self._lost += 1
            channel.state = "lost"
            for each in self._chains.forget(channel):
                self._send(each, ChannelFailed(each.name, f"{channel.worker}, which forwards to it, is lost"))
                self._lose(each, f"{channel.worker}, which forwards to it, is lost")
        self._channels.pop(channel.name, None)
        self._changed.notify_all()

    def _send(self, channel: WeightChannel, message: wire.Message) -> None:
        self._socket.send(channel.route, message)

    # --- one thread a channel: whatever blocks, blocks here ----------------------------------------------------------

    def _run_channel(self, channel: WeightChannel) -> None:
        try:
            with contextlib.closing(self._meet(channel)) as link:
                self._await_ready(channel)
                while (taken := self._next_snapshot(channel)) is not None:
                    if isinstance(taken, Claim):
                        self._follow(channel, taken)
                        version = taken.snapshot.version
                    else:
                        snapshot, workers = taken
                        form = self._merged.form_for(channel, snapshot, self._other_senders(channel))
                        self._transfer(channel, link, form, workers)
                        del form
                        version = snapshot.version
                        del snapshot
                    channel.last_seen = clock.now()
                    self._set_state(channel, "ready", acknowledged=version)
                    del taken
        except Exception as error:  # whatever a transport raises costs its channel alone
            with self._changed:
                self._lose(channel, str(error), fault=not isinstance(error, ChannelLost | RuntimeError | OSError))
        finally:
            if others := self._other_senders(channel):
                others.tell(CloseLink(channel.name))
            forget_keys(self._store, f"{channel.name}/")

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the rendezvous store."""
        return self.config.host, self._store.port

    def _join_s(self, channel: WeightChannel) -> float:
        """Time limit for building a channel's process groups, seconds. A server builds them one after the other."""
        return self.config.join_deadline_s * (channel.senders if channel.server_ranks else 1)

    def _other_senders(self, channel: WeightChannel) -> PartCommands | None:
        """Commands to the other ranks that send over a channel; None if rank 0 alone does."""
        return self._ranks if channel.senders > 1 else None

    def _meet(self, channel: WeightChannel) -> Link:
        invite = self._invite_to(channel)
        if others := self._other_senders(channel):
            others.tell(OpenLink(invite, channel.server_ranks))
        self._send(channel, invite)
        return self._transport.meet(invite, as_learner=True, server_ranks=channel.server_ranks)

    def _invite_to(self, channel: WeightChannel) -> ChannelInvite:
        return ChannelInvite(channel.name, channel.backend, *self.store, self._join_s(channel), channel.senders)

    def _await_ready(self, channel: WeightChannel) -> None:
        """Wait until a channel's worker is connected to all ranks that send. If a worker that is alive does not connect
        in time, the channel counts as `PartCommands.unreached`. Raises ChannelLost."""
        others = self._other_senders(channel)
        try:
            self._await(channel, ChannelReady, None, clock.now() + self._join_s(channel))
        except ChannelLost:
            if others and clock.now() - channel.last_seen < SILENCE_S:
                others.unreached += 1
            raise
        if others:
            others.is_reached = True
        self._set_state(channel, "ready")

    def _next_snapshot(self, channel: WeightChannel) -> tuple[Snapshot, int] | Claim | None:
        """Wait for a snapshot that the channel's worker does not have, and begin to send it. Returns (snapshot, number
        of workers that get it along the chain) if the learner sends it, a `Claim` if the worker before this one
        forwards it, and None once the channel or the publisher has ended."""
        since = clock.now()
        with self._changed:
            while not self._closed and channel.state != "lost":
                if channel.claim:
                    claim, channel.claim = channel.claim, None
                    return claim
                if self._snapshot and self._snapshot.version != channel.acknowledged:
                    if not self._chains.awaits_claim(channel, self._snapshot, since):
                        return self._begin(channel, self._snapshot)
                    self._changed.wait(0.05)
                    continue
                self._changed.wait(1.0)  # with the snapshot in no variable: it would outlive its withdrawal
                since = clock.now()
        return None

    def _begin(self, channel: WeightChannel, snapshot: Snapshot) -> tuple[Snapshot, int]:
        """Begin to send a snapshot to a channel's worker. Called with `_changed` held."""
        others = self._other_senders(channel)
        if others and not snapshot.adapter:  # before the next version replaces this one
            others.tell(HoldPart(channel.name, snapshot.version, bool(delta_base_for(channel, snapshot))))
        channel.state = "sending"
        workers = self._chains.claim(channel, snapshot, partial(delta_base_for, snapshot=snapshot))
        self._changed.notify_all()
        return snapshot, workers

    def _follow(self, channel: WeightChannel, claim: Claim) -> None:
        """Have a worker receive a version from another worker, the one before it in a chain, instead of from the
        learner, and wait until it has loaded it. `claim`: the version, and the worker's place in that chain."""
        snapshot = self._merged.form_for(channel, claim.snapshot, self._other_senders(channel), sends=False)
        channel.transfers, channel.sent_bytes = channel.transfers + 1, 0
        manifest = self._manifest(channel, snapshot, {}, claim.delta_to)
        size = forwarded_bytes(snapshot.parts, self.bucket_bytes, claim.workers)
        how = {"from_upstream": True, "forwards": claim.forwards, "bucket_bytes": size}
        self._announce(channel, structs.replace(manifest, **how))
        deadline = clock.now() + self.config.transfer_deadline_s
        channel.digest = self._await(channel, ChannelLoaded, snapshot.version, deadline).digest
        channel.was_delta = bool(claim.delta_to)

    def _manifest(
        self, channel: WeightChannel, snapshot: Snapshot, checksums: dict[str, str], delta_to: DeltaBase | None
    ) -> ChannelManifest:
        parts = as_sent(snapshot, bool(delta_to))
        how = (snapshot.version, parts, self.bucket_bytes, checksums, snapshot.canary, snapshot.adapter)
        return ChannelManifest(channel.name, *how, delta_to, self._bases.may_follow(snapshot))

    def _announce(self, channel: WeightChannel, manifest: ChannelManifest) -> None:
        """Send a manifest, and wait until the worker is ready for its weights."""
        deadline = clock.now() + self.config.transfer_deadline_s
        self._send(channel, manifest)
        self._await(channel, ChannelPosted, manifest.version, deadline)
        channel.posted = manifest.version
        self._set_state(channel, "sending")

    def _transfer(self, channel: WeightChannel, link: Link, snapshot: Snapshot, workers: int) -> None:
        expected, delta_to = expected_in_server(channel, snapshot), delta_base_for(channel, snapshot)
        manifest = self._manifest(channel, snapshot, expected, delta_to)
        size = forwarded_bytes(snapshot.parts, self.bucket_bytes, workers)
        self._announce(channel, structs.replace(manifest, forwards=workers > 1, bucket_bytes=size))
        deadline, others = clock.now() + self.config.transfer_deadline_s, self._other_senders(channel)
        if others and not channel.server_ranks:
            others.tell(SendPart(channel.name, self.config.transfer_deadline_s, size, as_delta=bool(delta_to)))
        how = {"to_server": bool(channel.server_ranks), "as_delta": bool(delta_to)}
        channel.sent_bytes = send_part(link, snapshot, size, deadline, **how) * copies_sent(channel)
        if others and channel.server_ranks:  # which takes one part after the other
            for sender in range(1, len(snapshot.parts)):
                self._await(channel, ChannelPosted, snapshot.version, deadline)
                others.tell(SendPart(channel.name, deadline - clock.now(), size, sender))
        channel.digest = self._await(channel, ChannelLoaded, snapshot.version, deadline).digest
        channel.was_delta = bool(delta_to)

    def _await(self, channel: WeightChannel, kind: type[wire.Message], version: Version | None, deadline: float) -> Any:
        """Wait for the channel's next message of type `kind`, for `version` if given. Raises ChannelLost.

        The deadline does not run while the worker puts its update off.
        """
        silent_since, timeout_s = clock.now(), deadline - clock.now()
        while channel.state != "lost" and not self._closed:
            if channel.puts_off:
                deadline = clock.now() + timeout_s
            try:
                message = channel.inbox.get(timeout=min(0.2, max(0.001, deadline - clock.now())))
            except queue.Empty:
                if clock.now() >= deadline:
                    raise ChannelLost(f"no {kind.__name__} by the deadline") from None
                if clock.now() - max(channel.last_seen, silent_since) > SILENCE_S:
                    raise ChannelLost(f"silent for {SILENCE_S:g} s while {kind.__name__} was due") from None
                continue
            if isinstance(message, ChannelFailed):
                self._wrong += message.wrong
                raise ChannelLost(message.error)
            if isinstance(message, kind) and version in (None, getattr(message, "version", None)):
                return message
        raise ChannelLost("the channel has ended")

    def _set_state(self, channel: WeightChannel, state: str, acknowledged: Version | None = None) -> None:
        with self._changed:
            if channel.state == "lost":
                raise ChannelLost("the channel has ended")
            channel.state = state
            channel.acknowledged = acknowledged or channel.acknowledged
            if state == "ready":
                channel.follows = False
                self._chains.extend(self._channels.values(), self._invite_to)
            self._changed.notify_all()
