"""Messages between a worker and its environment processes, framed as those of verifier processes."""

import msgspec

NO_STATE = msgspec.msgpack.encode(None)
"""State of an environment that has answered without one."""


class EnvironmentRules(msgspec.Struct, frozen=True):
    """Settings shared by all calls of a run: keys of [environment]."""

    name: str
    timeout_s: float
    memory_mb: int
    traced: bool = False
    """Whether error texts contain the whole traceback."""


class EnvironmentCall(msgspec.Struct, array_like=True, frozen=True):
    """A turn to answer."""

    key: int
    text: str
    number: int
    complete: bool
    state: bytes
    """State of the last observation, MessagePack; empty before the first."""
    prompt: str
    label: str


class EnvironmentAnswer(msgspec.Struct, array_like=True, frozen=True):
    """An observation, or the error why there is none."""

    key: int
    text: str = ""
    state: bytes = b""
    done: bool = False
    error: str = ""
