"""Encoding of a message as a ZeroMQ multipart.

The parts are a 24-byte header, a MessagePack body with one typed struct and the descriptors of the arrays, and frames
with the raw little-endian arrays, several to a frame. Nothing is pickled. Input that does not decode raises `WireError`
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

from april.util.versions import PROTOCOL
from april.wire import sessions, training, work
from april.wire.limits import FROM_BROKER, Limits, clip
from april.wire.message import Message

MAGIC = b"AP"
HEADER = struct.Struct("<2sBxIQQ")
"""Layout of the 24-byte header: magic, protocol, number of arrays, session id, sequence number."""
MAX_JOINED_BYTES = 4 << 20
"""Maximum size (bytes) of a frame into which several arrays are joined: one 64 KB frame is sent almost twice as fast as
two of 32 KB."""

DTYPES: dict[str, np.dtype[Any]] = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}
MESSAGE_MODULES = (sessions, work, work, training, sessions)
MESSAGES = [
    kind for kind in Message.__subclasses__() if kind.__module__ in {module.__name__ for module in MESSAGE_MODULES}
]
if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = reduce(or_, MESSAGES)

Buffer = bytes | memoryview
Kind = TypeVar("Kind")


class WireError(ValueError):
    """Frames that are not a valid message of this protocol, or a message that is not permitted now; the text says
    why."""

    @property
    def cause(self) -> str:
        """The text up to its first colon, which is the same for all errors of a kind; refused messages are counted by
        it."""
        return str(self).split(":")[0]


class ProtocolMismatch(WireError):
    """Raised for a message whose header names another version of the protocol than this one; the rest of it was not
    read."""

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


BodyDecoder = msgspec.msgpack.Decoder[Body[Any]]
EMPTY_FRAME = memoryview(b"")
_encoder = msgspec.msgpack.Encoder()
BROKER_BODIES = msgspec.msgpack.Decoder(Body[AnyMessage])
"""Decoder of message bodies for all types of messages that the broker receives or sends."""
_codes = {dtype: code for code, dtype in DTYPES.items()}


class PackedArray(msgspec.Struct, frozen=True, gc=False):
    """A flat array in wire format. It is forwarded with the checksum that the array's first sender computed."""

    dtype: str
    checksum: int
    data: Buffer


class Received(msgspec.Struct, frozen=True):
    """A decoded message."""

    message: Any
    packed: list[PackedArray]
    """The message's arrays, checked against their checksums, ready to be forwarded."""
    session: int = 0
    sequence: int = 0

    @property
    def arrays(self) -> list[np.ndarray]:
        """The message's arrays as read-only numpy views of the frames."""
        return [np.frombuffer(packed.data, DTYPES[packed.dtype]) for packed in self.packed]

    @property
    def array_bytes(self) -> int:
        return sum(len(packed.data) for packed in self.packed)


def pack(array: np.ndarray) -> PackedArray:
    data = np.ascontiguousarray(array)
    view = data.reshape(-1).view("u1").data
    return PackedArray(_codes[data.dtype], crc32(view), view)


def encode(
    message: Message,
    arrays: Sequence[np.ndarray | PackedArray] = (),
    session: int = 0,
    sequence: int = 0,
    protocol: int = PROTOCOL,
) -> list[Buffer]:
    """Encode a message as frames. Arrays are flat, of int32, float32 or uint8; an array that fills a separate frame is
    not copied.

    `session`: session id; `sequence`: number of the message or, for an answer, of the request. `protocol`: version in
    the header; another one than this April's is used only for a `Refused` to a peer of that version. Header and
    `Refused` have the same format in all versions.
    """
    heads: list[ArrayHead] = []
    parts: list[Buffer] = []
    frames: list[Buffer] = []
    size = 0
    for array in arrays:
        packed = array if isinstance(array, PackedArray) else pack(array)
        data = packed.data
        heads.append(ArrayHead(packed.dtype, len(data) // DTYPES[packed.dtype].itemsize, packed.checksum))
        if size and size + len(data) > MAX_JOINED_BYTES:
            frames.append(join(parts))
            parts, size = [], 0
        parts.append(data)
        size += len(data)
    if size:
        frames.append(join(parts))
    header = HEADER.pack(MAGIC, protocol, len(heads), session, sequence)
    body = Body(message, heads)
    try:
        return [header, _encoder.encode(body), *frames]
    except UnicodeEncodeError:
        return [header, _encoder.encode(encodable(msgspec.to_builtins(body, builtin_types=(bytes,)))), *frames]


def encodable(value: Any) -> Any:
    """Copy a value of built-in types with each lone surrogate in its texts, which UTF-8 cannot encode, replaced by
    U+FFFD. Error messages of user code may have some."""
    if isinstance(value, dict):
        return {encodable(key): encodable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(inner) for inner in value]
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value


def join(parts: list[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode(bytes_like: Sequence[Any], limits: Limits = FROM_BROKER, bodies: BodyDecoder = BROKER_BODIES) -> Received:
    """Decode the frames of a message, the inverse of `encode`. `limits`: bounds that the message must keep. `bodies`
    decodes the expected message types. Raises WireError."""
    frames = [memoryview(frame) for frame in bytes_like]
    if len(frames) > limits.frames or sum(map(len, frames)) > limits.message_bytes:
        raise WireError("too large: more frames or bytes than a message may have")
    if len(frames) < 2 or len(frames[0]) != HEADER.size:
        raise WireError("not a message: wrong number of frames or header size")
    magic, protocol, count, session, sequence = HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise WireError("not a message of April")
    if protocol != PROTOCOL:
        raise ProtocolMismatch(protocol)
    if count > limits.arrays or len(frames[1]) > limits.body_bytes * max(1, count):
        raise WireError("too large: more arrays or a longer body than a message may have")
    try:
        body = bodies.decode(frames[1])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"body does not decode: {clip(str(error))}") from None
    if len(body.arrays) != count:
        raise WireError("arrays do not agree with the body")
    return Received(body.message, unpack(body.arrays, frames[2:]), session, sequence)


def read_session_id(frames: Sequence[Any]) -> int:
    """Session id in a message's header, read before anything else is checked; 0 without a valid header."""
    if not frames or len(frames[0]) != HEADER.size:
        return 0
    number: int = HEADER.unpack(frames[0])[3]
    return number


def unpack(heads: list[ArrayHead], frames: list[memoryview]) -> list[PackedArray]:
    """The arrays that `heads` describe, taken from the frames. A frame has one or several arrays, one after the other;
    no array spans two frames. Raises WireError if they do not agree."""
    packed, remaining_frames = [], iter(frames)
    frame, end = EMPTY_FRAME, 0
    for head in heads:
        dtype = DTYPES.get(head.dtype)
        if dtype is None or head.length < 0:
            raise WireError("array of an unknown type or length")
        if head.length and end == len(frame):
            frame, end = next(remaining_frames, EMPTY_FRAME), 0
        start, end = end, end + head.length * dtype.itemsize
        data = frame[start:end]
        if len(data) != end - start:
            raise WireError("array of another size than its frame has room for")
        if crc32(data) != head.checksum:
            raise WireError("array checksum does not agree")
        packed.append(PackedArray(head.dtype, head.checksum, data))
    if end != len(frame) or next(remaining_frames, None) is not None:
        raise WireError("frames hold more than the arrays")
    return packed
