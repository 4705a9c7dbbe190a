"""What every peer of the broker says, whatever its role: coming, living, leaving."""

import msgspec

from april.wire.message import Message, Name, Seconds
from april.wire.version import Number

DENIED = "access denied: "
"""how a `Refused` begins that is final for the peer: its key is not one for what it does"""


class Hello(Message):
    """First message of a peer, on its data connection. `leases` are the ids of those it still works on."""

    role: str
    name: Name
    uid: Name
    leases: list[int] = []
    acknowledged_tokens: Number = 0
    """of its own, by its own count"""


class Welcome(Message):
    session: int
    run: str
    start: int
    """of the broker, counted"""
    round: int
    watermark: int
    lost: list[int]
    renew_s: float
    weights_address: str
    weights_key: str = ""
    """CURVE key of the learner's publisher, "" without CURVE"""


class Bind(Message):
    """First message on the control connection; its header carries the session."""


class Slots(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the samples in a worker's hands are at; those that wait for a score or the broker's disk are left out."""

    generating: Number = 0
    admission: Number = 0
    """that its engine has taken, and not begun"""
    weights: Number = 0
    """that go on once weights are loaded"""
    tool: list[int] = []
    """leases whose environment has the word"""


class Heartbeat(Message):
    """A live peer, at least every second. A non-empty `leases` renews them."""

    leases: list[int] = []
    emitted_tokens: Number = 0
    """sampled since its process started"""
    received_bytes: Number = 0
    """arrays that have reached it in this session; the broker sends only so much ahead"""
    place: Name = ""
    """where its main loop is, "" where that is not said"""
    for_s: Seconds = 0.0
    """how long already"""
    usual_s: Seconds = 0.0
    """how long that usually takes, 0 where it is not known"""
    slots: Slots | None = None
    """of a worker; None where it does not say"""


class Renewed(Message):
    """The answer to a heartbeat; `lost` leases are not current any more."""

    lost: list[int]


class Goodbye(Message):
    pass


class Refused(Message):
    """The answer to a message that cannot be accepted; final for that message."""

    reason: str
    lease_id: int = 0
    """of older protocols; always 0"""


class Stop(Message):
    """The run is over, or the peer is not wanted: finish and leave."""

    reason: str
