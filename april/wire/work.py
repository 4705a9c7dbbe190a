"""What the broker and the holders of leases, workers and scorers, say to each other."""

from typing import Literal

import msgspec

from april.wire.message import Address, Message, Name
from april.wire.version import Number, Version

GiveBackCause = Literal[
    "abort", "leave", "recall", "generation_failed", "environment_failed", "scoring_failed", "agent_failed"
]


class Holding(Message):
    """The weights a worker samples from, and how many samples it takes at once."""

    version: Version
    capacity: Number
    loaded_in_s: float = 0.0


class Room(Message):
    """How many leases a scorer takes at once, or sessions an agents process."""

    capacity: Number
    address: Address = ""
    """base URL under which other agents processes reach the API of this one"""


class Task(msgspec.Struct, array_like=True, frozen=True):
    """What the samples of a group have in common."""

    group: int
    evaluation: bool
    label: str
    reward: str
    """name of the verifier"""
    temperature: float
    top_p: float
    top_k: int
    min_p: float

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn from a part of the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """A lease."""

    lease_id: int
    task: int
    """place of its task in the message"""
    index: int
    scoring: bool
    max_new_tokens: int
    seed: int
    finish_reason: str
    hand_over: bool
    """the lease ends with the last tokens; somebody else scores the response"""
    together: list[str]
    """finish reasons of the responses that are scored together"""
    turns: int
    """of the policy that the environment has answered"""
    turn_start: int
    """response tokens before the turn under way"""
    state: bytes
    """of the environment behind its last observation; with `together` those of all responses, a MessagePack array"""
    stops: list[int]
    """token ids that end the turn, beside those that always do"""

    @property
    def responses(self) -> int:
        """How many arrays of the message are its own."""
        return len(self.together) or 1


class Grants(Message):
    """Leases, those of one group with one task. Arrays, int32: the prompt [P] of each task, then of each grant the
    response so far [T], or, with `together`, the whole responses of its group, one array each."""

    tasks: list[Task]
    grants: list[Grant]


class Scored(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The end of a lease: the score of its response, or those of all responses of a grant with `together`."""

    lease_id: int
    rewards: list[float]
    details: list[dict[Name, float]]
    """what each reward is made of"""
    superseded: list[tuple[Number, Number]] = []
    """of a session: (branch, length) where an earlier execution of its agent has gone further than the last one"""
    state: bytes = b""
    """of a session: MessagePack, for a verifier that sees its whole group"""


class GiveBack(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The end of a lease: its holder stops working on the sample."""

    lease_id: int
    length: Number
    """response tokens, those of this report included"""
    cause: GiveBackCause
    error: str = ""


class Closed(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The end of a session whose agent has given no reward: a verifier does."""

    lease_id: int
    superseded: list[tuple[Number, Number]] = []
    """as in `Scored`"""
    state: bytes = b""
    """MessagePack of what the agent leaves to the verifier; empty for nothing"""


Closing = Scored | GiveBack | Closed


class Report(Message):
    """All that a holder has to say of its leases: new tokens, and behind them the leases that end.

    Arrays, uint8, unless nothing is new: rows (`wire.rows`), and their payloads.
    """

    closings: list[Closing] = []


class Answers(Message):
    """What became of reports since the last one, sent when it is on disk."""

    lengths: list[tuple[int, int]] = []
    """(lease id, response tokens that are on disk)"""
    done: list[int] = []
    """leases that have ended as they were reported to"""
    resend: list[tuple[int, int]] = []
    """(lease id, length): what lies behind that length is missing; its tokens are wanted from there on"""
    refused: list[tuple[int, str]] = []
    """(lease id, reason): the lease is not this holder's any more"""


class Abort(Message):
    """Hand back every grant up to and including the watermark, also those that arrive later."""

    round: int
    watermark: int


class Cancel(Message):
    """These leases have ended; drop them without an answer."""

    leases: list[int]
    hand_back: bool = False
    """they have not: each that still generates is to be given back as `recall`, with its tokens"""


class Lane(Message):
    """What a worker did, for the record, from start to end (unix seconds)."""

    kind: Literal["generate"]
    start: float
    end: float
