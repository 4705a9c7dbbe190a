"""The name of one set of policy weights."""

from typing import Annotated, NamedTuple

import msgspec

MAX_NUMBER = 2**53
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
"""A count in a message: an integer that every JSON reader represents exactly."""


class Version(NamedTuple):
    """Weights after `step` consumed batches, made by learner incarnation `incarnation`.

    A learner that restarts from a checkpoint is a new incarnation, so two different sets of weights never share a
    version. Staleness and order compare steps alone.
    """

    incarnation: Number
    step: Number

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"
