"""The name of one set of policy weights."""

from typing import NamedTuple


class Version(NamedTuple):
    """`step` batches have been consumed by these weights; `branch` counts learner restarts.

    A learner that restarts from a checkpoint opens a new branch, so that two different weights never
    share a name. Staleness and ordering are measured in steps alone.
    """

    branch: int
    step: int

    def __str__(self) -> str:
        return f"{self.branch}.{self.step}"
