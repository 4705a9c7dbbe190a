"""Weight transports: the ways in which weights get to the workers. Either the learner sends buckets of bytes to each
worker, over a process group per channel or through memory that both share; or workers read snapshots that the learner
has written; or a framework loads the weights itself, and a channel only signals when it has.

A transport knows nothing of versions, checksums or membership. Damaged data is detected by checksum elsewhere, and a
channel that fails is dropped and replaced by a new one. Imports no torch at module level, since every process checks
the configuration.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec
import numpy as np

from april.config import Config, WeightsSection, is_loopback
from april.config.section import AUTO
from april.util import clock
from april.util.errors import refuse
from april.weights import channel
from april.weights.channel import ChannelInvite
from april.wire.sockets.base import own_address, route_to

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

Received: TypeAlias = "Callable[[Tensor], object]"
"""Function that a receiver calls with each bucket of weights once that bucket has arrived; its result is ignored."""


class Link:
    """One side, the learner's or the worker's, of a connection that carries one rank's tensors over a weight
    channel."""

    @abstractmethod
    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """Send uint8 buckets on the transport's device from the learner's side, in order, by `deadline` (Unix time,
        seconds). Raises RuntimeError or OSError."""

    @abstractmethod
    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """Receive the same buckets in place on the worker's side, by `deadline` (Unix time, seconds)."""

    def receive_each(self, buckets: "Iterable[Tensor]", deadline: float, received: "Received") -> None:
        """Receive the buckets in place by `deadline` (Unix time, seconds), and call `received` with each that has
        arrived: while later buckets still arrive if the transport `forwards`, otherwise when all have."""
        expected = list(buckets)
        self.receive(expected, deadline)
        for bucket in expected:
            received(bucket)

    def close(self) -> None:
        """Free what this side of the link holds; the other side's transfers then fail. Called once, by the thread that
        transfers."""


class Transport:
    """Opens links of weight channels; base class of the registry `weights.transport`."""

    carries_weights: ClassVar[bool] = True
    """Whether the channels carry weights; otherwise the trainer loads them, and a channel only signals when it has."""
    takes_servers: ClassVar[bool] = False
    """Whether an inference server can join a channel in its worker's stead (`engine.weights` = 'broadcast')."""

    forwards: ClassVar[bool] = False
    """Whether workers can forward what they receive in chains (`weights.channel_size`)."""
    is_local: ClassVar[bool] = False
    """Whether a link's two sides have to be on one machine."""
    device: ClassVar[str] = "cpu"
    """Device in whose memory both sides have the buckets: cpu | cuda."""
    pulls: ClassVar[bool] = False
    """Whether workers read the weights from snapshots that the learner writes (`weights.folder`); there are no channels
    then."""

    def __init__(self, config: WeightsSection):
        self.config = config

    @abstractmethod
    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> Link:
        """Connect to the other side of the link named `invite.channel`, within `invite.timeout_s` seconds; may be
        called in any thread. `as_learner`: whether this side sends.

        `server_ranks`: number of ranks of the inference server that joins in the worker's stead; 0: the worker joins
        itself. Raises RuntimeError or OSError.
        """


def weights_towards(config: Config, broker: str) -> WeightsSection:
    """The configuration section `[weights]` with host and backend resolved.

    `weights.host` = 'auto' becomes this machine's address on the route to the broker. Raises ConfigError if no keys are
    set and that address is not loopback. Shared devices (`devices.share`) need the backend gloo.
    """
    weights = config.weights
    if config.devices.share:
        weights = weights.model_copy(update={"backend": "gloo"})
    if weights.host != AUTO:
        return weights
    own = own_address(*route_to(broker))
    if config.keys is None and not is_loopback(own):
        refuse(
            "weights.host",
            "auto",
            f"leads to {own} on the network, where anybody could come in",
            "leave out security.keys, or make keys with `april keygen KEYS` and set security.keys = 'KEYS'",
        )
    return weights.model_copy(update={"host": own})


# --- process groups ---------------------------------------------------------------------------------------------------


class CollectiveTransport(Transport):
    """Broadcasts weights over a process group per channel."""

    takes_servers = forwards = True

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "GroupLink":
        rendezvous = channel.connect_to_store(invite.host, invite.port, invite.timeout_s)
        rank = channel.LEARNER if as_learner else channel.WORKER
        group = channel.join(invite.channel, rendezvous, rank, invite.backend, invite.timeout_s, server_ranks)
        return GroupLink(group, invite.backend)


class GroupLink(Link):
    """One side of a weight channel whose process group carries the weights."""

    def __init__(self, group: "dist.Backend", backend: str):
        """Tensors pass through the memory of the accelerator that is the calling thread's current one, if `backend` is
        nccl."""
        import torch

        self._group = group
        self._stream = torch.cuda.Stream() if backend == "nccl" else None

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        channel.transfer(self._group, buckets, self._stream, deadline)

    receive = send
    """Receive buckets: the same call as `send`, as a broadcast is the same on both sides."""

    def receive_each(self, buckets: "Iterable[Tensor]", deadline: float, received: "Received") -> None:
        channel.transfer(self._group, buckets, self._stream, deadline, received)


# --- shared memory ----------------------------------------------------------------------------------------------------


SLOT_BYTES = 2**20
"""Bytes that are copied into the shared memory at a time: few enough for the worker to find them in the processor's
cache."""
SLOTS = 8
"""Number of slots of a channel's shared memory: the learner fills some while the worker empties others."""
MOST_SAID_BYTES = 4096
"""Maximum size in bytes of the learner's first message to a worker over the Unix socket."""
CREDENTIALS = "3i"
"""Layout of SO_PEERCRED: process, user and group of a Unix socket's other side."""


class OtherMachine(RuntimeError):
    """Raised if learner and worker cannot share memory, since they are on different machines, accelerators or users'
    accounts."""


FOR_OTHERS = "set weights.transport = 'collective' for others"
"""Advice at the end of error sentences of transports that need both sides on one machine: what to set for workers on
other machines."""


class SharedMemoryTransport(Transport):
    """Copies weights through memory that the learner shares with a worker on its machine.

    The memory has no name: its descriptor goes over a Unix socket, which takes processes of the same user only. So the
    kernel frees it with its last holder, however that ends. The socket stays open, says which slots are full or empty,
    and ends at once with the other side.
    """

    is_local = forwards = True

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "SharedMemoryLink":
        if sys.platform != "linux":
            raise OtherMachine(f"{self._said} needs Linux; {FOR_OTHERS}")
        store = channel.connect_to_store(invite.host, invite.port, invite.timeout_s)
        key = f"{invite.channel}/socket"
        if not as_learner:
            return self._enter(store.get(key), invite.timeout_s)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0april-{secrets.token_hex(16)}")  # in the abstract namespace, which leaves no file
            listener.listen()
            store.set(key, listener.getsockname())
            return self._admit(listener, clock.now() + invite.timeout_s)

    @property
    def _said(self) -> str:
        return f"weights.transport = {self.config.transport!r}"

    def _admit(self, listener: socket.socket, deadline: float) -> "SharedMemoryLink":
        """The learner's side: accept the connection of a worker of the same user, and share memory with it (`_lend`).
        Raises OtherMachine if no such worker connects by `deadline` (Unix time, seconds)."""
        while (left_s := deadline - clock.now()) > 0:
            listener.settimeout(left_s)
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                break
            if user_of(peer) == os.geteuid():
                return self._lend(peer)
            peer.close()
        raise OtherMachine(
            f"no worker of the learner's machine and user has come within weights.join_deadline_s; {self._said} takes "
            f"no other, {FOR_OTHERS}"
        )

    def _enter(self, address: bytes, timeout_s: float) -> "SharedMemoryLink":
        """The worker's side: connect to the learner's socket at `address`, and map the memory that the learner shares
        (`_borrow`). Raises OtherMachine if no learner of the same machine and user is there."""
        peer, content, descriptors = socket.socket(socket.AF_UNIX), b"", list[int]()
        peer.settimeout(timeout_s)
        with contextlib.suppress(ConnectionRefusedError):
            peer.connect(address)
            if user_of(peer) == os.geteuid():
                content, descriptors, *_ = socket.recv_fds(peer, MOST_SAID_BYTES, 1)
        try:
            if not content or (self.device == "cpu" and not descriptors):
                raise OtherMachine(
                    f"{self._said} takes workers of the learner's machine and user only, and no such learner is here; "
                    f"start the worker there, or {FOR_OTHERS}"
                )
            return self._borrow(peer, content, descriptors)
        except RuntimeError:
            peer.close()
            raise

    def _lend(self, peer: socket.socket) -> "SharedMemoryLink":
        """Allocate shared memory, and send its descriptor to the worker."""
        with os.fdopen(os.memfd_create("april-weights"), "r+b") as memory:
            memory.truncate(SLOTS * SLOT_BYTES)
            socket.send_fds(peer, [FULL], [memory.fileno()])
            return SharedMemoryLink(peer, mapped(memory.fileno()))

    def _borrow(self, peer: socket.socket, content: bytes, descriptors: list[int]) -> "SharedMemoryLink":
        """The worker's side: map the memory that the learner shares. `content`, `descriptors`: bytes and file
        descriptors of the learner's first message over `peer`."""
        with os.fdopen(descriptors[0], "r+b") as memory:
            return SharedMemoryLink(peer, mapped(memory.fileno()))


def mapped(memory: int) -> np.ndarray:
    """The slots in the shared memory of a descriptor, uint8 [SLOTS, SLOT_BYTES]."""
    return np.frombuffer(mmap.mmap(memory, SLOTS * SLOT_BYTES), np.uint8).reshape(SLOTS, SLOT_BYTES)


def user_of(peer: socket.socket) -> int:
    """Id of the user who runs the process on the other side of a Unix socket, as the kernel reports it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
    return int(struct.unpack(CREDENTIALS, credentials)[1])


FULL = EMPTY = b"."
"""Byte that the learner sends for each slot that it has filled, and the worker for each slot that it has emptied."""


class SharedMemoryLink(Link):
    """One side of a weight channel through shared memory, used as a ring of slots."""

    def __init__(self, peer: socket.socket, slots: Any):
        """`peer`: socket to the other side. `slots`: the shared memory, uint8 [slots, bytes], in a form that `copy`
        takes."""
        self._peer, self._slots = peer, slots

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        empty = len(self._slots)
        for slot, piece, _ in self._pieces(buckets):
            empty = empty or self._heard(deadline)
            self.copy(slot, piece)
            self._peer.sendall(FULL)
            empty -= 1
        while empty < len(self._slots):
            empty += self._heard(deadline)

    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        self.receive_each(buckets, deadline, id)

    def receive_each(self, buckets: "Iterable[Tensor]", deadline: float, received: "Received") -> None:
        full = 0
        for slot, piece, whole in self._pieces(buckets):
            full = full or self._heard(deadline)
            self.copy(piece, slot)
            self._peer.sendall(EMPTY)
            full -= 1
            if whole is not None:
                received(whole)

    def close(self) -> None:
        self._peer.close()

    @staticmethod
    def copy(to: Any, source: Any) -> None:
        """Copy values in one thread: torch's threads would wait for each other at every slot."""
        np.copyto(to, source)

    @staticmethod
    def divided(bucket: "Tensor", size: int) -> list[Any]:
        """A bucket in pieces of at most `size` bytes, in a form that `copy` takes."""
        return [piece.numpy() for piece in bucket.split(size)]

    def _pieces(self, buckets: "Iterable[Tensor]") -> "Iterator[tuple[Any, Any, Tensor | None]]":
        """Yield (the part of a slot that a piece of the buckets takes, the piece, the bucket if it is the bucket's last
        piece)."""
        slots = cycle(self._slots)
        for bucket in buckets:
            *pieces, last = self.divided(bucket, self._slots.shape[1])
            for piece in pieces:
                yield next(slots)[: len(piece)], piece, None
            yield next(slots)[: len(last)], last, bucket

    def _heard(self, deadline: float) -> int:
        """Wait for a message from the other side; returns the number of slots that it has filled or emptied since the
        last one."""
        self._peer.settimeout(channel.remaining_time(deadline).total_seconds())
        try:
            words = self._peer.recv(len(self._slots))
        except TimeoutError:
            channel.remaining_time(deadline)
            raise
        if not words:
            raise ConnectionError("the other side of the weight channel is gone")
        return len(words)


# --- snapshots --------------------------------------------------------------------------------------------------------


class PullTransport(Transport):
    """Has workers read the weights from snapshots: `april/weights/folders.py`, `april/weights/puller.py`."""

    pulls = True

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> Link:
        raise RuntimeError("weights.transport = 'pull' has no channels")


# --- externally loaded weights ----------------------------------------------------------------------------------------


class ExternalTransport(Transport):
    """Coordinates engines with a framework that loads the weights into the inference servers itself."""

    carries_weights = False

    def __init__(self, config: WeightsSection):
        super().__init__(config)
        self._collective = CollectiveTransport(config)
        self._externally_loaded = threading.Event()
        """Event that is set while the inference servers hold the version that was announced last."""

    def expect(self) -> None:
        """Note that a new version was announced, which the framework has not loaded into the servers yet."""
        self._externally_loaded.clear()

    def arrived(self) -> None:
        """Note that the framework has loaded the announced version into all servers."""
        self._externally_loaded.set()

    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> "ExternalLink":
        gloo_invite = msgspec.structs.replace(invite, backend="gloo")
        return ExternalLink(self._collective.meet(gloo_invite, as_learner), self._externally_loaded)


class ExternalLink(Link):
    """A channel that carries no weights: the learner sends one byte once the framework has loaded them."""

    def __init__(self, link: GroupLink, externally_loaded: threading.Event):
        self._link, self._externally_loaded = link, externally_loaded

    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        if not self._externally_loaded.wait(max(0.0, deadline - clock.now())):
            raise TimeoutError("the trainer has not loaded the weights within weights.transfer_deadline_s")
        self._signal(deadline)

    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        self._signal(deadline)

    def _signal(self, deadline: float) -> None:
        import torch

        self._link.send([torch.zeros(1, dtype=torch.uint8)], deadline)
