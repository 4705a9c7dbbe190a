"""The messages between broker, workers and learner, and how they travel over ZeroMQ.

A message is a multipart of: a fixed 24-byte header, a MessagePack body holding one typed struct and the
description of the arrays, then the raw little-endian arrays one behind the other, many to a frame. Nothing is pickled;
whatever does not decode raises `WireError` and nothing else.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32

from april.limits import FROM_BROKER, Limits, clip
from april.version import Number, Version

MAGIC = b"AP"
PROTOCOL = 4
HEADER = struct.Struct("<2sBxIQQ")
"""magic, protocol, number of arrays, session, sequence number: 24 bytes"""
JOINED_BYTES = 4 << 20
"""arrays are joined up to so much: ZeroMQ carries one frame of 64 KB almost twice as often as two of 32 KB"""

DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}

CHUNK_ARRAYS = ("i4", "f4", "i4", "i4")
"""dtypes of a chunk's arrays; the last two only where the distribution is cut"""

DENIED = "access denied: "
"""how a `Refused` begins that is final for the peer: its key is not one for what it does"""

Name = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""of a peer, a process or a place"""


class WireError(ValueError):
    """Frames that are no message of this protocol, or not one for now; the text says why."""

    @property
    def cause(self) -> str:
        """The text without what differs from message to message, to count by."""
        return str(self).split(":")[0]


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A fact or a request; the class name is its tag on the wire."""


# --- sessions -------------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a peer, on its data connection. `leases` are tokens it still works on."""

    role: str
    name: Name
    uid: Name
    leases: list[int] = []
    acknowledged_tokens: Number = 0
    """of its own, by its own count"""


class Welcome(Message):
    session: int
    run: str
    epoch: int
    round: int
    watermark: int
    lost: list[int]
    renew_s: float
    weights_address: str
    weights_key: str = ""
    """CURVE key of the learner's publisher, "" without CURVE"""


class Bind(Message):
    """First message on the control connection; its header carries the session."""


class Heartbeat(Message):
    """A live peer, at least every second. A non-empty `leases` renews them."""

    leases: list[int] = []
    emitted_tokens: Number = 0
    """sampled since its process started"""
    received_bytes: Number = 0
    """arrays that have reached it in this session; the broker sends only so much ahead"""


class Renewed(Message):
    """The answer to a heartbeat; `lost` leases are not current any more."""

    lost: list[int]


class Goodbye(Message):
    pass


class Refused(Message):
    """The answer to a message that cannot be accepted; final for that message."""

    reason: str
    token: int = 0


class Stop(Message):
    """The run is over, or the peer is not wanted: finish and leave."""

    reason: str


# --- workers --------------------------------------------------------------------------------------------


class Holding(Message):
    """The weights a worker samples from, and how many samples it takes at once."""

    version: Version
    capacity: Number
    loaded_in_s: float = 0.0


class Room(Message):
    """How many leases a scorer takes at once."""

    capacity: Number


class Grant(Message):
    """A lease. Arrays: the prompt int32 [P], then the response so far in pieces, int32 each; with `together` the whole
    responses of a group instead, one array each."""

    token: int
    group: int
    index: int
    scoring: bool
    evaluation: bool
    max_new_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    label: str
    reward: str
    finish_reason: str
    hand_over: bool = False
    """the lease ends with the last chunk; somebody else scores the response"""
    together: list[str] = []
    """finish reasons of the responses that are scored together"""
    turns: Number = 0
    """of the policy that the environment has answered"""
    turn_start: Number = 0
    """response tokens before the turn under way"""
    state: bytes = b""
    """of the environment behind its last observation"""
    min_p: float = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn from a part of the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Chunk(Message):
    """New tokens of a leased sample; a finish reason (stop | length) says that they are its last.
    Arrays: ids int32 [T], behaviour logprobs float32 [T]; of training samples in a run that cuts the distribution, also
    how many ids each was drawn from, int32 [T], and those ids one token behind the other, int32."""

    token: int
    start: Number
    version: Version
    finish_reason: Literal["", "stop", "length"] = ""


class Observation(Message):
    """What the environment has answered to a turn; a finish reason says that the response ends with it.
    Array: ids int32 [T], which are not trained."""

    token: int
    start: Number
    state: bytes = b""
    finish_reason: Literal["", "stop", "length"] = ""
    failed: bool = False
    """the environment has not answered; the tokens say so to the policy"""


class Acknowledged(Message):
    """What is on disk: all tokens of a lease below a length, and the `done` leases' Scored or GiveBack."""

    lengths: list[tuple[int, int]]
    """(token, length)"""
    done: list[int]


class ResendFrom(Message):
    token: int
    start: int


class Scored(Message):
    token: int
    reward: float
    details: dict[Name, float] = {}
    """what the reward is made of"""


class ScoredTogether(Message):
    """The scores of all responses of a grant with `together`, in their order."""

    token: int
    rewards: list[float]
    details: list[dict[Name, float]]


class GiveBack(Message):
    """The worker stops working on a sample."""

    token: int
    length: Number
    cause: Literal["abort", "leave", "generation_failed", "environment_failed", "scoring_failed"]
    error: str = ""


class Abort(Message):
    """Hand back every grant up to and including the watermark, also those that arrive later."""

    round: int
    watermark: int


class Cancel(Message):
    """These leases have ended; drop them without an answer."""

    tokens: list[int]


class Lane(Message):
    """What a worker did, for the record, from start to end (unix seconds)."""

    kind: Literal["generate"]
    start: float
    end: float


# --- learner --------------------------------------------------------------------------------------------


class LearnerStart(Message):
    """The learner holds checkpoint `step`; deliveries after it are wanted again."""

    step: Number
    weights_address: Name


class LearnerStarted(Message):
    branch: int
    frontier: int


class WeightsAt(Message):
    address: str
    key: str = ""
    """CURVE key of the publisher, "" without CURVE"""


class Fetch(Message):
    step: Number


class SampleHead(msgspec.Struct, array_like=True, frozen=True):
    index: int
    response_tokens: int
    reward: float
    finish_reason: str
    segments: list[tuple[int, int, Version]]


class GroupHead(msgspec.Struct, array_like=True, frozen=True):
    group: int
    prompt_tokens: int
    samples: list[SampleHead]


class Batch(Message):
    """The answer to Fetch, in one or more parts: some of the `total` groups of a step, from the `first` on.
    Arrays of each group: the prompt int32, then of each of its samples those of a chunk: all with supports, or none."""

    step: int
    first: int
    total: int
    groups: list[GroupHead]


class Finished(Message):
    """There is no batch any more."""

    reason: str


class Consumed(Message):
    """A batch is behind the learner: in the weights, or discarded because its loss or gradient was not finite."""

    step: Number
    metrics: dict[Name, float]
    discarded: Literal["", "nonfinite"] = ""


class Durable(Message):
    """Checkpoint `step` is on disk; none older than `oldest` is kept."""

    step: Number
    oldest: Number


class Accepted(Message):
    pass


# --- monitors -------------------------------------------------------------------------------------------


class StatusRequest(Message):
    pass


class Status(Message):
    """Arrays: one uint8 frame of JSON."""


class StopRun(Message):
    """End the run; `state` is what summary.json says of it: stopped | failed."""

    reason: str
    state: Literal["stopped", "failed"] = "stopped"


class Drain(Message):
    """Hand out nothing more and have back what is generated, until `on` is false; it outlasts restarts."""

    on: bool = True


class DeadLettersRequest(Message):
    pass


class DeadLetters(Message):
    """Arrays: one uint8 frame of JSON."""


class Requeue(Message):
    """Draw the prompts of these dead groups again; none named: of all that can be."""

    groups: list[int] = []


class Requeued(Message):
    """`groups`: those that this request has re-queued."""

    groups: list[int]


# --- weight lanes (learner rank 0 <-> worker) ---------------------------------------------------------------


class LaneJoin(Message):
    """A worker without a lane asks for one, again and again until it is invited."""

    uid: Name
    name: Name
    device: Name
    held: Version | None
    """what it samples from already, and need not be sent"""
    ranks: Number = 0
    """of an inference server that joins in the worker's place; 0: the worker joins itself"""


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


class LanePosted(Message):
    lane: str
    version: Version


class LaneLoaded(Message):
    lane: str
    version: Version


class LaneFailed(Message):
    lane: str
    error: str


MESSAGES = [kind for kind in Message.__subclasses__()]
AnyMessage = MESSAGES[0]
for _kind in MESSAGES[1:]:
    AnyMessage = AnyMessage | _kind


class ArrayHead(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    length: int
    checksum: int


class Body(msgspec.Struct, array_like=True, frozen=True):
    message: AnyMessage
    arrays: list[ArrayHead]


NOTHING = memoryview(b"")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Body)
_codes = {dtype: code for code, dtype in DTYPES.items()}


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A flat array as it travels: passed on with the checksum that its maker gave it."""

    dtype: str
    checksum: int
    data: bytes | memoryview


class Received(msgspec.Struct, frozen=True):
    """A decoded message."""

    message: Any
    packed: list[Packed]
    """its arrays, checked, as they can be passed on"""
    session: int = 0
    sequence: int = 0

    @property
    def arrays(self) -> list[np.ndarray]:
        """Read-only views of the frames."""
        return [np.frombuffer(packed.data, DTYPES[packed.dtype]) for packed in self.packed]

    @property
    def array_bytes(self) -> int:
        return sum(len(packed.data) for packed in self.packed)


def pack(array: np.ndarray) -> Packed:
    data = np.ascontiguousarray(array)
    view = memoryview(data.reshape(-1).view("u1"))
    return Packed(_codes[data.dtype], crc32(view), view)


def encode(message: Message, arrays: Sequence[np.ndarray | Packed] = (), session: int = 0, sequence: int = 0) -> list:
    """Frames to send. Arrays are int32, float32 or uint8, and flat; one that has a frame of its own is not copied."""
    heads, parts, frames, size = [], [], [], 0
    for array in arrays:
        packed = array if isinstance(array, Packed) else pack(array)
        data = packed.data
        heads.append(ArrayHead(packed.dtype, len(data) // DTYPES[packed.dtype].itemsize, packed.checksum))
        if size and size + len(data) > JOINED_BYTES:
            frames.append(join(parts))
            parts, size = [], 0
        parts.append(data)
        size += len(data)
    if size:
        frames.append(join(parts))
    header = HEADER.pack(MAGIC, PROTOCOL, len(heads), session, sequence)
    return [header, _encoder.encode(Body(message, heads)), *frames]


def join(parts: list[bytes | memoryview]) -> bytes | memoryview:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode(frames: list, limits: Limits = FROM_BROKER) -> Received:
    """The inverse of `encode`; `frames` are bytes-like. Raises WireError."""
    frames = [memoryview(frame) for frame in frames]
    if len(frames) > limits.frames or sum(map(len, frames)) > limits.message_bytes:
        raise WireError("too large: more frames or bytes than a message may have")
    if len(frames) < 2 or len(frames[0]) != HEADER.size:
        raise WireError("not a message: wrong number of frames or header size")
    magic, protocol, count, session, sequence = HEADER.unpack(frames[0])
    if magic != MAGIC or protocol != PROTOCOL:
        raise WireError(f"not a message of protocol {PROTOCOL}")
    if count > limits.arrays or len(frames[1]) > limits.body_bytes * max(1, count):
        raise WireError("too large: more arrays or a longer body than a message may have")
    try:
        body = _decoder.decode(frames[1])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"body does not decode: {clip(str(error))}") from None
    if len(body.arrays) != count:
        raise WireError("arrays do not agree with the body")
    return Received(body.message, unpack(body.arrays, frames[2:]), session, sequence)


def unpack(heads: list[ArrayHead], frames: list[memoryview]) -> list[Packed]:
    """The arrays that lie in the frames one behind the other, each in one of them."""
    packed, left = [], iter(frames)
    frame, end = NOTHING, 0
    for head in heads:
        dtype = DTYPES.get(head.dtype)
        if dtype is None or head.length < 0:
            raise WireError("array of an unknown type or length")
        if head.length and end == len(frame):
            frame, end = next(left, NOTHING), 0
        start, end = end, end + head.length * dtype.itemsize
        data = frame[start:end]
        if len(data) != end - start:
            raise WireError("array of another size than its frame has room for")
        if crc32(data) != head.checksum:
            raise WireError("array checksum does not agree")
        packed.append(Packed(head.dtype, head.checksum, data))
    if end != len(frame) or next(left, None) is not None:
        raise WireError("frames hold more than the arrays")
    return packed
