"""What the broker and the holders of leases, workers and scorers, say to each other."""

from typing import Literal

from april.wire.message import Message, Name
from april.wire.version import Number, Version

Ending = Literal["", "stop", "length"]
""""" while a response goes on, or else how it ended"""
GiveBackCause = Literal["abort", "leave", "generation_failed", "environment_failed", "scoring_failed"]
CHUNK_ARRAYS = ("i4", "f4", "i4", "i4")
"""dtypes of a chunk's arrays; the last two only where the distribution is cut"""


class Holding(Message):
    """The weights a worker samples from, and how many samples it takes at once."""

    version: Version
    capacity: Number
    loaded_in_s: float = 0.0


class Room(Message):
    """How many leases a scorer takes at once."""

    capacity: Number


class Grant(Message):
    """A lease. Arrays: the prompt int32 [P], then the response so far in pieces, int32 each; with `together` the whole
    responses of a group instead, one array each."""

    lease_id: int
    group: int
    index: int
    scoring: bool
    evaluation: bool
    max_new_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    label: str
    reward: str
    finish_reason: str
    hand_over: bool = False
    """the lease ends with the last chunk; somebody else scores the response"""
    together: list[str] = []
    """finish reasons of the responses that are scored together"""
    turns: Number = 0
    """of the policy that the environment has answered"""
    turn_start: Number = 0
    """response tokens before the turn under way"""
    state: bytes = b""
    """of the environment behind its last observation"""
    min_p: float = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn from a part of the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Chunk(Message):
    """New tokens of a leased sample; a finish reason (stop | length) says that they are its last.
    Arrays: ids int32 [T], behaviour logprobs float32 [T]; of training samples in a run that cuts the distribution, also
    how many ids each was drawn from, int32 [T], and those ids one token behind the other, int32."""

    lease_id: int
    start: Number
    version: Version
    finish_reason: Ending = ""


class Observation(Message):
    """What the environment has answered to a turn; a finish reason says that the response ends with it.
    Array: ids int32 [T], which are not trained."""

    lease_id: int
    start: Number
    state: bytes = b""
    finish_reason: Ending = ""
    failed: bool = False
    """the environment has not answered; the tokens say so to the policy"""


class Acknowledged(Message):
    """What is on disk: all tokens of a lease below a length, and the `done` leases' Scored or GiveBack."""

    lengths: list[tuple[int, int]]
    """(lease id, length)"""
    done: list[int]


class ResendFrom(Message):
    lease_id: int
    start: int


class Scored(Message):
    lease_id: int
    reward: float
    details: dict[Name, float] = {}
    """what the reward is made of"""


class ScoredTogether(Message):
    """The scores of all responses of a grant with `together`, in their order."""

    lease_id: int
    rewards: list[float]
    details: list[dict[Name, float]]


class GiveBack(Message):
    """The worker stops working on a sample."""

    lease_id: int
    length: Number
    cause: GiveBackCause
    error: str = ""


class Abort(Message):
    """Hand back every grant up to and including the watermark, also those that arrive later."""

    round: int
    watermark: int


class Cancel(Message):
    """These leases have ended; drop them without an answer."""

    leases: list[int]


class Lane(Message):
    """What a worker did, for the record, from start to end (unix seconds)."""

    kind: Literal["generate"]
    start: float
    end: float
