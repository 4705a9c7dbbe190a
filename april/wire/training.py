"""What the broker and the learner say to each other."""

from typing import Literal

import msgspec

from april.wire.message import Message, Name
from april.wire.version import Number, Version

TOKEN_ARRAYS = ("i4", "f4", "i4", "i4")
"""dtypes of a sample's arrays: ids and their behaviour log-probabilities [T], and where the distribution is cut the
numbers of ids in the supports [T] and those ids"""
Discard = Literal["", "nonfinite"]
"""why a batch was passed over; "" if it was trained"""


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
    Arrays of each group: the prompt int32, then of each of its samples `TOKEN_ARRAYS`: all with supports, or none."""

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
    discarded: Discard = ""


class Durable(Message):
    """Checkpoint `step` is on disk; none older than `oldest` is kept."""

    step: Number
    oldest: Number


class Accepted(Message):
    pass
