"""Messages between the broker and agents processes, besides reports, answers and heartbeats.

An agent session is a lease on a sample. The agent's input to the policy is reported as an observation whose state is a
`TurnRequest`; the policy's output comes back as `SessionTurns`. A session is a tree: input that does not continue the
last answer starts a fork, which has an id of its own next to the lease id.
"""

from typing import Literal

import msgspec

from april.wire.message import Message
from april.wire.version import Number

MAX_STOP_TOKENS = 16
"""Most token ids that one turn may name as stop tokens."""
MAX_KEY_BYTES = 64
"""Longest `TurnRequest.key`."""
MAX_FORKS = 256
"""Most forks of a session, the first one (fork 0) included. A session's lease id is a multiple of this number and is
also the id of fork 0; the id of fork k is the lease id plus k."""


def session_lease_id(lease_id: int) -> int:
    """The lease id of the session to which the id of a fork belongs."""
    return lease_id - lease_id % MAX_FORKS


class TurnRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How to sample the turn that follows an observation; stored as MessagePack in the observation's state."""

    key: bytes
    """Hash of the request, by which a replayed agent finds the recorded answer."""
    max_tokens: Number
    """Most tokens of the turn."""
    stop_token_ids: list[int] = []
    """Token ids that end the turn, in addition to those that end every turn."""


class AgentSession(msgspec.Struct, array_like=True, frozen=True):
    """A lease on a sample whose agent program the receiver has to run."""

    lease_id: int
    group: int
    index: int
    evaluation: bool
    prompt: str
    """JSON of the dataset row's prompt: a text or chat messages."""
    label: str
    max_tokens: int
    """Token budget of the whole session, input and output together."""
    temperature: float


class AgentSessionList(Message):
    """Agent sessions to run. Two uint8 arrays per session: rows and payloads, as in a report, of its history so far.
    After a new `Hello`, sessions that the peer still holds are sent once more."""

    sessions: list[AgentSession]


class SessionTurns(Message):
    """Newly journaled tokens of the receiver's sessions. Two uint8 arrays: rows (with fork ids) and their payloads.
    The finish reason of a row is the turn's."""


class HolderRequest(Message):
    """Asks which agents process holds a session. The fields come from the session key that a client has shown."""

    group: Number
    index: Number
    lease_id: Number


class Holder(Message):
    """Answer to `HolderRequest`: the session is `held` by the process at `address`, has `moved` to another lease (which
    may still have to be granted), or is `over`."""

    group: int
    index: int
    lease_id: int
    state: Literal["held", "moved", "over"]
    address: str = ""
    """Base URL of the holder's API; "" while the holder is not connected."""
