"""The base class of all messages, the bounded types of their fields, and the version of policy weights."""

from typing import Annotated, NamedTuple, dataclass_transform

import msgspec

Name = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text without control characters: the name of a peer, of a process, or of a stage of a peer's main loop."""
Address = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[^\x00-\x20\x7f]*$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
MAX_NUMBER = 2**53
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
"""An integer from 0 up to the largest one that every JSON reader represents exactly."""


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base class of all messages, typed structs. The class name is the message's tag on the wire; fields are sent by
    position."""


class Version(NamedTuple):
    """Names one set of policy weights: those after `step` consumed batches, made by learner incarnation `incarnation`.

    A learner that restarts from a checkpoint is a new incarnation, so two different sets of weights never share a
    version. Staleness and order compare steps alone.
    """

    incarnation: Number
    step: Number

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"
