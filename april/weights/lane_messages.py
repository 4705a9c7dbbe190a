"""What the learner's rank 0 and a worker say to each other about weights."""

import msgspec

from april.weights.canary import Canary
from april.wire.codec import Body
from april.wire.message import Message, Name
from april.wire.version import Number, Version


class LaneJoin(Message):
    """A worker without a lane asks for one, again and again until it is invited."""

    uid: Name
    name: Name
    device: Name
    held: Version | None
    """what it samples from already, and need not be sent"""
    ranks: Number = 0
    """of an inference server that joins in the worker's place; 0: the worker joins itself"""
    base: Name = ""
    """checksum of the model that it has, to which an adapter may come; empty: it wants whole weights"""


class LaneInvite(Message):
    """Build a group with the learner (rank 0) under the name of the lane, which is never used again."""

    lane: str
    backend: str
    host: str
    port: int
    timeout_s: float


class LaneReady(Message):
    lane: str


class LaneAlive(Message):
    """A worker that keeps its lane, twice a second."""

    lane: str


class TensorHead(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    shape: list[int]


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """How the weights of a version are made of a model and of what was trained beside it (`april/weights/base.py`)."""

    base: str
    """checksum of the model"""
    scaling: float
    """of B A"""
    dtype: str
    """of the weights that are made"""
    without: list[str] = []
    """tensors of the model's files that no version has: what is tied to others"""


class LaneManifest(Message):
    """What is sent next over the lane: the tensors one behind the other in `total_bytes`, in buckets."""

    lane: str
    version: Version
    tensors: list[TensorHead]
    total_bytes: int
    bucket_bytes: int
    checksum: int
    server_checksums: dict[str, str] = {}
    """what an inference server will say of each of its tensors; none: do not ask"""
    canary: Canary | None = None
    """what an engine with these weights will say of a text; none: it is not published"""
    adapter: Adapter | None = None
    """what the tensors are to the weights, where they are not all of them"""


class LanePosted(Message):
    lane: str
    version: Version


class LaneLoaded(Message):
    lane: str
    version: Version


class LaneFailed(Message):
    lane: str
    error: str
    wrong: bool = False
    """the engine does not hold the weights that it was sent"""


AnyLaneMessage = LaneJoin | LaneInvite | LaneReady | LaneAlive | LaneManifest | LanePosted | LaneLoaded | LaneFailed
LANES = msgspec.msgpack.Decoder(Body[AnyLaneMessage])
"""the `bodies` of `codec.decode` for this conversation"""
