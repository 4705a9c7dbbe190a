"""A weight channel between the learner and one worker, or the ranks of its inference server: the messages that set it
up, the rendezvous store, and the process groups that carry the bytes, one for each rank of the learner that sends.

A dead or hung peer breaks only its own channel. The groups are constructed directly, since torch's public functions
only make subgroups of the default group. Imports no torch at module level, since every process checks the
configuration, which imports the transports.
"""

import contextlib
import queue
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from april.util import clock
from april.util.errors import refuse
from april.weights.canary import Canary
from april.wire.codec import Body
from april.wire.message import Message, Name, Number, Version
from april.wire.sockets.base import own_address

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


# --- messages ---------------------------------------------------------------------------------------------------------

MAX_SENDERS = 4096
"""Maximum number of the learner's ranks that may send weights to one worker."""


class ChannelJoin(Message):
    """Request of a worker for a weight channel; repeated until the learner invites the worker."""

    uid: Name
    name: Name
    device: Name
    held: Version | None
    """Version of the weights that the worker has loaded and need not be sent again; None if it has none."""
    ranks: Number = 0
    """Number of ranks of all inference servers that join in the worker's stead; 0: the worker joins itself."""
    base: Name = ""
    """Checksum of the worker's base model, for which the learner may send adapters; "": the worker needs complete
    weights."""
    digest: Name = ""
    """Checksum of the version `held` if the worker keeps it, so that deltas to it may be sent; otherwise ""."""


class ChannelInvite(Message):
    """Invites a worker to the process groups of a new channel, in each of which a rank of the learner is rank 0. A
    channel's name is never reused."""

    channel: str
    backend: str
    host: str
    port: int
    timeout_s: float
    senders: Number = 1
    """Number of the learner's ranks that send over the channel, each over a link of its own
    (`link_name`)."""


def link_name(channel: str, sender: int) -> str:
    """Name of the link of a channel over which the learner's rank `sender` sends; rank 0's has the channel's name."""
    return f"{channel}/{sender}" if sender else channel


class ChannelForward(Message):
    """Tells a worker to connect to the next worker of its chain, and to forward to that worker what it receives. In the
    process groups between the two, the receiver of this message is rank 0. `invite`: how they find each other."""

    channel: str
    invite: ChannelInvite


class ChannelFollow(Message):
    """Tells a worker to connect to the worker before it in its chain, which will forward weights to it. `invite`: how
    they find each other."""

    channel: str
    invite: ChannelInvite


class ChannelLinked(Message):
    """Tells the learner whether the worker has connected to the one before it in its chain (answer to
    `ChannelFollow`)."""

    channel: str
    upstream: str
    """Name of the link between the two workers, as the learner's `ChannelFollow` gave it."""
    error: str = ""
    """Why the worker could not connect; "" if it could."""


class ChannelReady(Message):
    """The worker has joined the channel's process groups."""

    channel: str


class ChannelAlive(Message):
    """Sign of life of a worker that keeps its channel, sent every 0.5 seconds."""

    channel: str
    puts_off: bool = False
    """Whether the worker puts off loading the weights that the manifest has announced. While it does, the learner does
    not wait for this worker, and the worker's deadlines do not run."""


CLOSED = -1
"""Number that a variable has instead of a file descriptor once that descriptor is closed."""


class TensorHead(msgspec.Struct, array_like=True, frozen=True):
    """Name, dtype and shape of a tensor in the transferred bytes."""

    name: str
    dtype: str
    shape: list[int]


class WeightPart(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of a version that one rank of the learner sends, concatenated to `total_bytes`."""

    tensors: list[TensorHead]
    total_bytes: int
    checksum: str
    """Checksum of the bytes (`april.weights.snapshot.checksum`)."""
    digest: str = ""
    """SHA-256 of the bytes (`april.weights.snapshot.digest`); "" if only a delta is sent, which is checked by
    `delta_digest`."""
    delta_digest: str = ""
    """SHA-256 of the bytes of the delta, if the part is sent as a delta. "" if the part is sent whole, or if `digest`
    checks the tensors that result from the delta."""


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """How to merge the trained tensors of a version into the base model (`april/weights/base.py`)."""

    base: str
    """Checksum of the base model that the adapter belongs to."""
    scaling: float
    """Scaling factor of the product B A in the merge."""
    dtype: str
    """Dtype of the merged weights."""
    without: list[str] = []
    """Names of tensors in the model's files that the merged weights leave out because they are tied to other
    tensors."""


class DeltaBase(msgspec.Struct, array_like=True, frozen=True):
    """Names the weights to which a delta is applied, by version and checksum."""

    version: Version
    digest: str
    """Checksum of the whole version (`april.weights.snapshot.joint_checksum`)."""


class ChannelManifest(Message):
    """Announces the next transfer over a channel: a part from each sender, in buckets of `bucket_bytes`."""

    channel: str
    version: Version
    parts: list[WeightPart]
    """Part of the version that each rank of the learner sends, beginning with rank 0."""
    bucket_bytes: int
    server_checksums: dict[str, str] = {}
    """Expected checksum of each of the inference server's tensors, by name; empty: do not verify them."""
    canary: Canary | None = None
    """Canary with the learner's log-probabilities under these weights; None if the learner publishes none."""
    adapter: Adapter | None = None
    """How to merge the tensors, if they are an adapter's; None if they are complete weights."""
    delta_to: DeltaBase | None = None
    """Weights to which the parts come as deltas; None: they come whole."""
    may_follow: bool = False
    """Whether the learner may send the next version as a delta to this one, so that the worker should keep this one."""
    from_upstream: bool = False
    """Whether the worker before this one in its chain forwards the version, instead of the learner."""
    forwards: bool = False
    """Whether the worker forwards the version to the next one of its chain."""


class ChannelPosted(Message):
    """The worker is ready to receive the weights that the manifest has announced. An inference server receives the
    parts of a version one after the other, and this message is sent before each part."""

    channel: str
    version: Version


class ChannelLoaded(Message):
    """The worker's engine samples from these weights now."""

    channel: str
    version: Version
    digest: Name = ""
    """Checksum of these weights if the worker keeps them, so that deltas to them may be sent; otherwise ""."""


class ChannelFailed(Message):
    """Tells the other side that the channel has ended, and why (`error`). Sent by the learner or by the worker."""

    channel: str
    error: str
    wrong: bool = False
    """Whether the reason is that the engine holds other weights than it was sent, as the canary or checksums show."""


AnyChannelMessage = (
    ChannelJoin
    | ChannelInvite
    | ChannelForward
    | ChannelFollow
    | ChannelLinked
    | ChannelReady
    | ChannelAlive
    | ChannelManifest
    | ChannelPosted
    | ChannelLoaded
    | ChannelFailed
)
CHANNEL_BODIES = msgspec.msgpack.Decoder(Body[AnyChannelMessage])
"""Decoder of the channel messages, for the argument `bodies` of `codec.decode`."""


# --- state of a channel -----------------------------------------------------------------------------------------------


class ChannelLost(RuntimeError):
    """Raised when the worker of a channel is gone, has failed, or has missed a deadline."""


INBOX_MESSAGES = 64
"""Maximum number of a channel's received messages that wait to be handled; a worker that sends more loses its
channel."""


@dataclass(eq=False)
class WeightChannel:
    """What the learner's publisher knows of the channel to one worker."""

    name: str
    worker: str
    route: bytes
    backend: str
    last_seen: float
    state: str = "joining"
    acknowledged: Version | None = None
    puts_off: bool = False
    """Whether the worker puts off loading the weights that it was sent (the last `ChannelAlive` says so)."""
    posted: Version | None = None
    """The newest version for which the worker has said that it is ready to receive it (`ChannelPosted`); None before
    the first."""
    server_ranks: int = 0
    """Number of ranks of all inference servers that join in the worker's stead; 0: the worker joins itself."""
    senders: int = 1
    """Number of the learner's ranks that send over the channel."""
    transfers: int = 0
    """Number of versions that have been sent over the channel so far."""
    key: str = ""
    """CURVE public key of the worker; "" without CURVE."""
    base: str = ""
    """Checksum of the worker's base model, for which the learner may send adapters; "": the worker needs complete
    weights."""
    digest: str = ""
    """Checksum of the version that the worker has loaded last, if it keeps that as the base of deltas; otherwise ""."""
    was_delta: bool = False
    """Whether the last transfer was a delta."""
    sent_bytes: int = 0
    """Bytes of weights that rank 0 has sent in the last transfer."""
    upstream: "WeightChannel | None" = None
    """The channel of the worker before this channel's worker in its chain, which may forward versions to it; None at a
    chain's head and outside chains."""
    downstream: "WeightChannel | None" = None
    """The channel of the worker behind this channel's worker in its chain, to which it may forward versions; None at a
    chain's end and outside chains."""
    link: str = ""
    """Name of the links over which the worker before it in its chain forwards to this worker; "" without such a
    worker."""
    is_linked: bool = False
    """Whether the worker has connected to the one before it in its chain."""
    is_alone: bool = False
    """Whether the worker could not connect to another one, and stays out of chains."""
    claim: Any = None
    """The learner's decision that the worker receives a version from the one before it in its chain
    (`april.weights.chains.Claim`); None if there is none, or the publisher's thread has taken it."""
    follows: bool = False
    """Whether the worker receives the current version from the one before it in its chain, not from the learner."""
    inbox: queue.Queue[Any] = field(default_factory=lambda: queue.Queue(INBOX_MESSAGES))
    """Received messages of the channel: ChannelReady, ChannelPosted, ChannelLoaded and ChannelFailed."""

    @property
    def is_open(self) -> bool:
        """Whether the worker has joined the channel, and it has not ended."""
        return self.state in ("ready", "sending")


# --- rendezvous -------------------------------------------------------------------------------------------------------


def serve_store(host: str) -> "dist.TCPStore":
    """A rendezvous store (`TCPStore`) at `host`, which is `weights.host`, and a free port. Raises ConfigError.

    Other stores that this process opens for the same port share this one.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        refuse(
            "weights.host",
            host,
            f"is no address of this machine ({error.strerror})",
            "give the one under which workers reach learner rank 0",
        )
    return serve_store_at(listener)


def serve_store_at(listener: socket.socket) -> "dist.TCPStore":
    """Start a rendezvous store (`TCPStore`) on a socket that already listens; the store takes over the socket."""
    import torch.distributed as dist

    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def forget_keys(store: "dist.TCPStore", prefix: str) -> None:
    """Delete the keys that begin with `prefix`, such as those of a channel that has ended."""
    with contextlib.suppress(RuntimeError):  # the store ends, and its keys with it
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)


def connect_to_store(host: str, port: int, timeout_s: float) -> "dist.TCPStore":
    """Connect to a rendezvous store as a client. Each thread that waits needs a client of its own, since a waiting
    client blocks its other calls."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


# --- process group ----------------------------------------------------------------------------------------------------


LEARNER, WORKER = 0, 1
"""Ranks of the learner and of the worker in a channel. The ranks of an inference server start at `WORKER`."""
IN_FLIGHT = 2
"""Maximum number of buckets in transfer at a time: as many as gloo has threads for."""


def join(
    name: str, store: "dist.TCPStore", rank: int, backend: str, timeout_s: float, server_ranks: int = 0
) -> "dist.Backend":
    """Build the process group of the channel or link `name`, whose sides meet through `store`. `rank`: `LEARNER` or
    `WORKER`. `backend`: gloo | nccl. Raises RuntimeError or OSError if the other side does not join.

    gloo listens only at this machine's address on the route to the store. `server_ranks`: if above 0, the other side is
    a server with that many ranks, which prefixes its keys in the store as torch's own groups do. gloo may block for
    five times `timeout_s` (seconds), so call this from a thread that nobody waits for.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    device = "cuda" if backend == "nccl" else "cpu"
    if server_ranks:
        scoped = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    else:
        scoped = dist.PrefixStore(f"{name}/{device}/", store)
    size = 1 + (server_ranks or 1)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(scoped, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(store.host, store.port))]
    return dist.ProcessGroupGloo(scoped, rank, size, options)


def transfer(
    group: "dist.Backend",
    buckets: "Iterable[Tensor]",
    stream: "torch.cuda.Stream | None",
    deadline: float,
    received: "Callable[[Tensor], object] | None" = None,
) -> None:
    """Broadcast uint8 buckets from the learner to the worker, which receives them in place, by `deadline` (Unix time,
    s). `received` is called with each bucket whose broadcast is done. Raises RuntimeError or TimeoutError.

    `stream`: CUDA stream of this channel alone, on the accelerator whose memory the buckets pass through, so that
    transfers wait neither for training or generation there nor for another channel. None: buckets stay on the CPU.
    Several broadcasts overlap: gloo does a round trip for each, which takes longer than a bucket on a slow route.
    """
    import torch

    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        broadcast(group, buckets, stream, deadline, received)


def broadcast(
    group: "dist.Backend",
    buckets: "Iterable[Tensor]",
    stream: "torch.cuda.Stream | None",
    deadline: float,
    received: "Callable[[Tensor], object] | None" = None,
) -> None:
    """The work of `transfer`, with the same parameters. The caller has made `stream`, if it is given, the current CUDA
    stream of this thread."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = LEARNER
    pending: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    def finish_oldest() -> None:
        work, on_device, bucket = pending.popleft()
        work.wait(remaining_time(deadline))
        if on_device is not bucket:
            bucket.copy_(on_device)
        if received:
            received(bucket)

    for bucket in buckets:
        if len(pending) == IN_FLIGHT:
            finish_oldest()
        on_device = bucket.to(stream.device) if stream else bucket
        options.timeout = remaining_time(deadline)
        pending.append((group.broadcast([on_device], options), on_device, bucket))
    while pending:
        finish_oldest()


def remaining_time(deadline: float) -> timedelta:
    """Time left until `deadline` (Unix time, seconds). Raises TimeoutError if the deadline has passed."""
    remaining = timedelta(milliseconds=int(1000 * (deadline - clock.now())))
    if remaining <= timedelta(0):
        raise TimeoutError("the weights were not transferred within weights.transfer_deadline_s; raise it")
    return remaining
