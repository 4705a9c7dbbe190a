"""Messages between the learner's weight publisher (rank 0) and a worker."""

import msgspec

from april.weights.canary import Canary
from april.wire.codec import Body
from april.wire.message import Message, Name
from april.wire.version import Number, Version


class ChannelJoin(Message):
    """A worker without a channel asks for one; repeated until it is invited."""

    uid: Name
    name: Name
    device: Name
    held: Version | None
    """Version of the loaded weights, which need not be sent again."""
    ranks: Number = 0
    """Ranks of the inference server that joins in the worker's place; 0: the worker joins itself."""
    base: Name = ""
    """Checksum of the worker's base model, to which adapters may be sent; "": send complete weights."""


class ChannelInvite(Message):
    """Join the process group of a new channel; the learner is rank 0. A channel's name is never reused."""

    channel: str
    backend: str
    host: str
    port: int
    timeout_s: float


class ChannelReady(Message):
    """The worker has joined the process group."""

    channel: str


class ChannelAlive(Message):
    """Sign of life of a worker that keeps its channel, sent twice a second."""

    channel: str


class TensorHead(msgspec.Struct, array_like=True, frozen=True):
    """Name, dtype and shape of a tensor in the transferred bytes."""

    name: str
    dtype: str
    shape: list[int]


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """How to merge the trained tensors of a version into the base model (`april/weights/base.py`)."""

    base: str
    """Checksum of the base model."""
    scaling: float
    """Factor of B A in the merge."""
    dtype: str
    """Dtype of the merged weights."""
    without: list[str] = []
    """Tensors in the model's files that the weights leave out because they are tied to others."""


class ChannelManifest(Message):
    """Announces the next transfer: the tensors, concatenated to `total_bytes`, in buckets of `bucket_bytes`."""

    channel: str
    version: Version
    tensors: list[TensorHead]
    total_bytes: int
    bucket_bytes: int
    checksum: int
    server_checksums: dict[str, str] = {}
    """Expected checksum of each of the inference server's tensors; empty: do not verify."""
    canary: Canary | None = None
    """The canary's log-probabilities under these weights; None: not published."""
    adapter: Adapter | None = None
    """Set if the tensors are an adapter's, not complete weights."""


class ChannelPosted(Message):
    """The worker is ready to receive the announced weights."""

    channel: str
    version: Version


class ChannelLoaded(Message):
    """The worker's engine samples from these weights."""

    channel: str
    version: Version


class ChannelFailed(Message):
    """The channel has ended; sent by either side."""

    channel: str
    error: str
    wrong: bool = False
    """The engine was found not to hold the weights that it was sent."""


AnyChannelMessage = (
    ChannelJoin
    | ChannelInvite
    | ChannelReady
    | ChannelAlive
    | ChannelManifest
    | ChannelPosted
    | ChannelLoaded
    | ChannelFailed
)
CHANNEL_BODIES = msgspec.msgpack.Decoder(Body[AnyChannelMessage])
"""Decodes the bodies of these messages; the argument `bodies` of `codec.decode`."""
