"""Messages of every peer of the broker, whatever its role (opening, keeping and ending a session), and of monitors."""

from typing import Literal

import msgspec

from april.wire.message import Message, Name, Number, Seconds

DENIED = "access denied: "
"""Prefix of the reason of a `Refused` that is final for the peer: its key does not permit what it does."""


class Hello(Message):
    """First message of a peer, on its data connection. `lease_ids`: the leases it still works on."""

    role: str
    name: Name
    uid: Name
    lease_ids: list[int] = []
    acknowledged_tokens: Number = 0
    """Tokens of this process that the broker has acknowledged so far, by the peer's own count."""


class Welcome(Message):
    """Answer to `Hello`: the session is open."""

    session: int
    run: str
    broker_start: int
    """How many times the broker of this run has started."""
    round: int
    watermark: int
    """Largest lease id that the last abort covers."""
    lost_lease_ids: list[int]
    """Leases of the `Hello` that the peer does not hold any more."""
    renew_s: float
    """Seconds between two heartbeats that list all leases."""
    weights_address: str
    weights_key: str = ""
    """CURVE public key of the learner's publisher; "" without CURVE."""


class Bind(Message):
    """First message on the control connection. Its header carries the session to which the connection belongs."""


class Slots(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a worker's samples are doing, without those that wait for a score or for an acknowledgement."""

    generating: Number = 0
    awaiting_admission: Number = 0
    """Samples that the engine has queued and not started."""
    awaiting_weights: Number = 0
    """Samples that wait until new weights are loaded."""
    tool_lease_ids: list[int] = []
    """Leases that wait for their environment."""


class Heartbeat(Message):
    """Sign of life, sent at least every second. A non-empty `lease_ids` renews those leases."""

    lease_ids: list[int] = []
    emitted_tokens: Number = 0
    """Tokens sampled since the process started."""
    received_bytes: Number = 0
    """Bytes of arrays received in this session. The broker limits how much it sends beyond them."""
    loop_position: Name = ""
    """What the peer's main loop is doing, such as "decoding"; "" if not reported."""
    loop_elapsed_s: Seconds = 0.0
    """Seconds the loop has been there."""
    loop_usual_s: Seconds = 0.0
    """Seconds it usually stays there; 0 if unknown."""
    slots: Slots | None = None
    """Set by workers only; None if not reported."""


class Renewed(Message):
    """Answer to `Heartbeat`. The peer does not hold `lost_lease_ids` any more."""

    lost_lease_ids: list[int]


class Goodbye(Message):
    pass


class Refused(Message):
    """Answer to a message that cannot be accepted; final for that message."""

    reason: str
    lease_id: int = 0
    """Always 0; older protocols used it."""


class Stop(Message):
    """The run is over, or the peer was replaced: finish and leave."""

    reason: str


# --- monitors ---------------------------------------------------------------------------------------------------------


StopState = Literal["stopped", "failed"]


class StatusRequest(Message):
    pass


class Status(Message):
    """One uint8 array: the status as JSON."""


class StopRun(Message):
    """Ends the run. `state` is recorded in summary.json."""

    reason: str
    state: StopState = "stopped"


class Drain(Message):
    """Stops granting leases and recalls samples in generation, until a `Drain` with `on` false. Survives restarts."""

    on: bool = True


class DeadLettersRequest(Message):
    pass


class DeadLetters(Message):
    """One uint8 array: the dead letters as JSON."""


class Requeue(Message):
    """Draws the prompts of these dead groups again; an empty list means every dead group that can be redrawn."""

    groups: list[int] = []


class Requeued(Message):
    """`groups`: ids of the groups that this request has re-queued."""

    groups: list[int]
