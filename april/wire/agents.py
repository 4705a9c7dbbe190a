"""What the broker and agents processes say to each other, beside reports, answers and heartbeats.

A session is a lease on a sample. What its agent says to the policy is reported as an observation, whose state is a
`TurnRequest`; what the policy answers comes as `Turns`. A session is a tree: whatever does not follow the last answer
is a further branch, with an id of its own beside that of the lease.
"""

from typing import Literal

import msgspec

from april.wire.message import Message
from april.wire.version import Number

STOPS = 16
"""token ids that a turn may name"""
KEY_BYTES = 64
"""of a request"""
BRANCHES = 256
"""most of a session. So many ids belong to its lease, whose own is a multiple of that and stands for the branch that
the session begins with; the id of branch k lies k behind it"""


def session_of(lease_id: int) -> int:
    """The id of the session's lease to which that of a branch belongs."""
    return lease_id - lease_id % BRANCHES


class TurnRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How the turn behind an observation is sampled, and what it answers; MessagePack in the observation's state."""

    key: bytes
    """of the request: a hash by which a replayed agent finds its answer again"""
    max_tokens: Number
    """of the turn"""
    stops: list[int] = []
    """token ids that end it, beside those that always do"""


class Session(msgspec.Struct, array_like=True, frozen=True):
    """A lease on a sample whose agent is to be run."""

    lease_id: int
    group: int
    index: int
    evaluation: bool
    prompt: str
    """JSON: the prompt of the row, text or messages"""
    label: str
    max_tokens: int
    """of the whole session, both sides together"""
    temperature: float


class Sessions(Message):
    """Leases on agents to run. Arrays of each, uint8: rows and their payloads, as in a report, of all that was said in
    it so far. A session that its holder has already is told once more when it says hello again."""

    sessions: list[Session]


class Turns(Message):
    """New tokens of the holder's sessions, which are on disk. Arrays, uint8: rows, whose leases are the sessions', and
    their payloads; the ending of a row is that of its turn."""


class Whose(Message):
    """An agents process asks who holds a session: it was shown a key of it, which says these three."""

    group: Number
    index: Number
    lease_id: Number


class Holder(Message):
    """The answer: `held` by the agents process at `address`; `moved`, under another lease or soon; or `over`."""

    group: int
    index: int
    lease_id: int
    state: Literal["held", "moved", "over"]
    address: str = ""
    """base URL of its API, "" while it is not there"""
