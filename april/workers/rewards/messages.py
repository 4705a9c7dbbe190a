"""What a reward pool and its verifier processes say to each other: MessagePack behind a 4-byte little-endian length."""

import msgspec

LENGTH_BYTES = 4
READY = bytes(LENGTH_BYTES)
"""An empty frame: the process is up."""


class Item(msgspec.Struct, array_like=True, frozen=True):
    """One response to verify."""

    key: int
    verifier: str
    response: str
    label: str
    finish_reason: str


class Score(msgspec.Struct, array_like=True, frozen=True):
    """Its reward, or why there is none."""

    key: int
    reward: float | None
    error: str | None = None


def frame(message: Item | Score) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
