"""The name of one set of policy weights."""

from typing import Annotated, NamedTuple

import msgspec

LARGEST = 2**53
Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
"""what a count may be, wherever it comes from: every JSON reader can hold it"""


class Version(NamedTuple):
    """`step` batches have been consumed by these weights; `branch` counts learner restarts.

    A learner that restarts from a checkpoint opens a new branch, so that two different weights never
    share a name. Staleness and ordering are measured in steps alone.
    """

    branch: Number
    step: Number

    def __str__(self) -> str:
        return f"{self.branch}.{self.step}"
