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


class Meet(Message):
    """Where the learner's ranks meet, HOST:PORT: said by its first machine, asked for by the others with "". The answer
    is the same message; "" while nobody has said it."""

    place: Name = ""


class WeightsAt(Message):
    address: str
    key: str = ""
    """CURVE key of the publisher, "" without CURVE"""


class Submission(msgspec.Struct, array_like=True, frozen=True):
    """A prompt that the trainer brings."""

    tokens: Number
    label: str
    reward: Name = ""
    """name of its verifier, "" for the run's"""
    extra: bytes = b""
    """comes back with the group"""


class Submit(Message):
    """Prompts, numbered from `first` on in the order in which the trainer brings them. One array: their ids, int32, one
    behind the other."""

    first: Number
    prompts: list[Submission]


class Submitted(Message):
    """So many prompts have been brought."""

    count: int


class Fetch(Message):
    step: Number
    samples: bool = False
    """what is kept to be read is wanted, too: discarded samples behind the groups, and when each chunk was sampled"""


class Stay(msgspec.Struct, array_like=True, frozen=True):
    """A sample was with a worker, a scorer or an agents process."""

    what: str
    """generate | score | act"""
    where: str
    """its name"""
    began: float
    ended: float
    """Unix seconds"""
    start: int
    end: int
    """response tokens that there were"""
    how: str
    """how it ended: stop | length | scored | closed | void | a cause of a lease's end"""


class SampleHead(msgspec.Struct, array_like=True, frozen=True):
    index: int
    response_tokens: int
    reward: float
    finish_reason: str
    segments: list[tuple[int, int, Version]]
    details: dict[Name, float] = {}
    """what its reward is made of"""
    stays: list[Stay] = []
    branch: int = 0
    """of the session of an agent: its branches come one behind the other, each with the reward of the session"""
    chunks: list[tuple[int, float]] = []
    """of a sample that is kept to be read: (response tokens that there were, Unix seconds by the clock of whoever had
    it), of each chunk"""
    attempts: int = 0
    """of a discarded sample: leases that were lost or failed"""
    error: str = ""
    """of the last of them"""
    discarded_from: int = 0
    """of a discarded sample: what lies before is not"""
    parent: int = 0
    """of a branch: the one that it has left"""
    shared: int = 0
    """of a branch: the tokens at its beginning that are those of the one that it has left"""


class GroupHead(msgspec.Struct, array_like=True, frozen=True):
    group: int
    prompt_tokens: int
    samples: list[SampleHead]
    opened_at: float = 0.0
    delivered_at: float = 0.0
    """Unix seconds"""
    prompt: int = -1
    """number of a prompt that the trainer has brought, -1 for others"""
    extra: bytes = b""
    """what it has brought beside it"""
    discarded: str = ""
    """why these samples are none of the batch; then `delivered_at` is when they were discarded, and a reward that is
    not known is nan"""


class Batch(Message):
    """The answer to Fetch, in one or more parts: some of the `total` groups of a step, from the `first` on, those that
    were discarded last. Arrays of each group: the prompt int32, then of each of its samples `TOKEN_ARRAYS`: all with
    supports, or none.
    Without any group: the trainer has to bring more prompts before there can be such a batch."""

    step: int
    first: int
    total: int
    groups: list[GroupHead]


class Finished(Message):
    """There is no batch any more. Arrays of each group, as of a batch's."""

    reason: str
    groups: list[GroupHead] = []
    """what was discarded since the last batch, if the run has failed and it was asked for"""


class Consumed(Message):
    """A batch is behind the learner: in the weights, or discarded because its loss or gradient was not finite."""

    step: Number
    metrics: dict[Name, float]
    discarded: Discard = ""


class Durable(Message):
    """Checkpoint `step` is on disk; none older than `oldest` is kept."""

    step: Number
    oldest: Number


class BestWanted(Message):
    """Which checkpoints must stay, by `evaluation.best`?"""


class Best(Message):
    """The weights that were the most accurate are those of `step`, -1 where none are known; those of the steps
    `undecided` may turn out to be."""

    step: int
    undecided: list[int]


class Accepted(Message):
    pass
