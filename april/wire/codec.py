"""How a message travels over ZeroMQ, as a multipart.

A fixed 24-byte header, a MessagePack body that holds one typed struct and the description of the arrays, then the raw
little-endian arrays one behind the other, many to a frame. Nothing is pickled. What does not decode raises `WireError`,
and nothing else.
"""

import struct
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32

from april.wire import agents, operations, sessions, training, work
from april.wire.limits import FROM_BROKER, Limits, clip
from april.wire.message import Message

MAGIC = b"AP"
PROTOCOL = 6
HEADER = struct.Struct("<2sBxIQQ")
"""magic, protocol, number of arrays, session, sequence number: 24 bytes"""
JOINED_BYTES = 4 << 20
"""arrays are joined up to so much: ZeroMQ carries one frame of 64 KB almost twice as often as two of 32 KB"""

DTYPES: dict[str, np.dtype[Any]] = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}
CONVERSATIONS = (sessions, work, agents, training, operations)
MESSAGES = [kind for kind in Message.__subclasses__() if kind.__module__ in {one.__name__ for one in CONVERSATIONS}]
if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = reduce(or_, MESSAGES)

Buffer = bytes | memoryview
Kind = TypeVar("Kind")


class WireError(ValueError):
    """Frames that are no message of this protocol, or not one for now; the text says why."""

    @property
    def cause(self) -> str:
        """The text without what differs from message to message, to count by."""
        return str(self).split(":")[0]


class OtherProtocol(WireError):
    """A message of another version of this protocol; nothing of it but its header is read."""

    def __init__(self, protocol: int):
        super().__init__(f"not a message of protocol {PROTOCOL}: {protocol}")
        self.protocol = protocol


class ArrayHead(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    length: int
    checksum: int


class Body(msgspec.Struct, Generic[Kind], array_like=True, frozen=True):
    message: Kind
    arrays: list[ArrayHead]


Bodies = msgspec.msgpack.Decoder[Body[Any]]
NOTHING = memoryview(b"")
_encoder = msgspec.msgpack.Encoder()
BROKERS = msgspec.msgpack.Decoder(Body[AnyMessage])
"""of the conversations with the broker"""
_codes = {dtype: code for code, dtype in DTYPES.items()}


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A flat array as it travels: passed on with the checksum that its maker gave it."""

    dtype: str
    checksum: int
    data: Buffer


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
    view = data.reshape(-1).view("u1").data
    return Packed(_codes[data.dtype], crc32(view), view)


def encode(
    message: Message,
    arrays: Sequence[np.ndarray | Packed] = (),
    session: int = 0,
    sequence: int = 0,
    protocol: int = PROTOCOL,
) -> list[Buffer]:
    """Frames to send. Arrays are int32, float32 or uint8, and flat; one that has a frame of its own is not copied.

    `protocol`: another one only for the `Refused` that tells a peer of its own; header and `Refused` never change form.
    """
    heads: list[ArrayHead] = []
    parts: list[Buffer] = []
    frames: list[Buffer] = []
    size = 0
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
    header = HEADER.pack(MAGIC, protocol, len(heads), session, sequence)
    return [header, _encoder.encode(Body(message, heads)), *frames]


def join(parts: list[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode(bytes_like: Sequence[Any], limits: Limits = FROM_BROKER, bodies: Bodies = BROKERS) -> Received:
    """The inverse of `encode`, for messages of the kinds that `bodies` decodes. Raises WireError."""
    frames = [memoryview(frame) for frame in bytes_like]
    if len(frames) > limits.frames or sum(map(len, frames)) > limits.message_bytes:
        raise WireError("too large: more frames or bytes than a message may have")
    if len(frames) < 2 or len(frames[0]) != HEADER.size:
        raise WireError("not a message: wrong number of frames or header size")
    magic, protocol, count, session, sequence = HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise WireError("not a message of April")
    if protocol != PROTOCOL:
        raise OtherProtocol(protocol)
    if count > limits.arrays or len(frames[1]) > limits.body_bytes * max(1, count):
        raise WireError("too large: more arrays or a longer body than a message may have")
    try:
        body = bodies.decode(frames[1])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"body does not decode: {clip(str(error))}") from None
    if len(body.arrays) != count:
        raise WireError("arrays do not agree with the body")
    return Received(body.message, unpack(body.arrays, frames[2:]), session, sequence)


def session_in(frames: Sequence[Any]) -> int:
    """The session that the header of a message names, whatever else it may be; 0 without such a header."""
    if not frames or len(frames[0]) != HEADER.size:
        return 0
    number: int = HEADER.unpack(frames[0])[3]
    return number


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
