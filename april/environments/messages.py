"""What a worker and its environment processes say to each other, in the frames of a verifier's."""

import msgspec

NO_STATE = msgspec.msgpack.encode(None)
"""of an environment that has answered without one"""


class EnvironmentRules(msgspec.Struct, frozen=True):
    """What is the same for all calls of a run; keys of [environment]."""

    name: str
    timeout_s: float
    memory_mb: int
    traced: bool = False
    """errors hold the whole traceback"""


class Call(msgspec.Struct, array_like=True, frozen=True):
    """A turn to answer."""

    key: int
    text: str
    number: int
    complete: bool
    state: bytes
    """MessagePack; empty before the first observation"""
    prompt: str
    label: str


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The observation, or why there is none."""

    key: int
    text: str = ""
    state: bytes = b""
    done: bool = False
    error: str = ""
