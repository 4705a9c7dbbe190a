"""Messages of every peer of the broker, whatever its role (opening, keeping and ending a session), and messages of
monitors."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from april.wire.message import Message, Name, Number, Seconds
from april.wire.training import WeightFolder

DENIED = "access denied: "
"""Prefix of the reason in a `Refused` that is final for the peer: the peer's key does not permit what it does."""


class Hello(Message):
    """First message of a peer, on its data connection. `lease_ids`: leases that the peer still works on."""

    role: str
    name: Name
    uid: Name
    lease_ids: list[int] = []
    acknowledged_tokens: Number = 0
    """Number of tokens of this process that the broker has acknowledged so far, by the peer's own count."""


class Welcome(Message):
    """Answer to `Hello`: the session is open."""

    session: int
    run: str
    broker_start: int
    """Number of times that the broker of this run has started."""
    round: int
    watermark: int
    """Lease id up to which the last abort recalled leases."""
    lost_lease_ids: list[int]
    """Leases listed in `Hello` that the peer no longer holds."""
    renew_s: float
    """Interval of the heartbeats that list all leases, seconds."""
    weights_address: str
    weights_key: str = ""
    """CURVE public key of the learner's publisher; "" without CURVE."""
    weight_folders: list[WeightFolder] = []
    """Snapshots of weights that the learner has written, the newest first."""


class Bind(Message):
    """First message on the control connection. The message's header carries the session to which the connection
    belongs."""


class Slots(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Numbers of a worker's samples by what they wait for or do. Samples that wait for a score or an acknowledgement
    are not counted."""

    generating: Number = 0
    awaiting_admission: Number = 0
    """Number of samples that the engine has queued and not started."""
    awaiting_weights: Number = 0
    """Number of samples that wait until new weights are loaded."""
    tool_lease_ids: list[int] = []
    """Ids of the leases whose samples wait for an observation of their environment."""


class Heartbeat(Message):
    """Sign of life of a peer, sent at least every second. A non-empty `lease_ids` renews those leases."""

    lease_ids: list[int] = []
    emitted_tokens: Number = 0
    """Number of tokens sampled since the process started."""
    received_bytes: Number = 0
    """Bytes of arrays received in this session. The broker limits how many unacknowledged bytes it sends."""
    loop_position: Name = ""
    """Stage that the peer's main loop is in, such as "decoding"; "" if not reported."""
    loop_elapsed_s: Seconds = 0.0
    """Seconds that the main loop has been at `loop_position`."""
    loop_usual_s: Seconds = 0.0
    """Median seconds that the main loop stays at `loop_position`; 0 if unknown."""
    slots: Slots | None = None
    """Use of a worker's slots; None from other peers, or if not reported."""


class Renewed(Message):
    """Answer to `Heartbeat`. `lost_lease_ids`: leases that the peer no longer holds."""

    lost_lease_ids: list[int]


class Goodbye(Message):
    pass


class Refused(Message):
    """Answer to a message that the broker does not accept; the message gets no other answer."""

    reason: str
    lease_id: int = 0
    """Always 0; used by older protocol versions."""


class Stop(Message):
    """The run is over, or another process has taken this peer's role and name: finish and leave."""

    reason: str


# --- images -----------------------------------------------------------------------------------------------------------


MAX_IMAGES_ASKED = 64
"""Most names in one `FetchImages`."""


class FetchImages(Message):
    """A worker's or the learner's request for images. `names`: the sha256 of each file in hex."""

    names: list[Name]


class Images(Message):
    """Answer to `FetchImages`: the first images asked for, at least one; the peer asks again for the others. One uint8
    array for each, its PNG file; an empty one for an image that cannot be read."""

    names: list[str]


class KeepImage(Message):
    """Upload of an image in consecutive parts: by an agents process for a turn that will name it, by the learner for a
    prompt. One uint8 array: the bytes of its prepared PNG file from `start` on."""

    name: Name
    """Sha256 of the file in hex."""
    start: Number
    size: Number
    """Bytes of the whole file."""


IMAGE_PART_BYTES = 2 << 20
"""Most bytes of an image in one message."""


def image_parts(name: str, png: bytes) -> Iterator[tuple[KeepImage, list[np.ndarray]]]:
    """The messages, with their arrays, that upload the file `png` of an image; the broker answers the last one."""
    for start in range(0, len(png), IMAGE_PART_BYTES):
        yield KeepImage(name, start, len(png)), [np.frombuffer(png[start : start + IMAGE_PART_BYTES], np.uint8)]


class ImageKept(Message):
    """Answer to the last part of an image: it is on the broker's disk, and stays there at least ten minutes even if no
    turn or prompt names it."""

    name: str
    fault: str = ""
    """Why the image is not kept; "" if it is."""


# --- monitors ---------------------------------------------------------------------------------------------------------


StopState = Literal["stopped", "failed"]


class StatusRequest(Message):
    pass


class Status(Message):
    """Answer to `StatusRequest`. One uint8 array: the status of the run as JSON."""


class StopRun(Message):
    """Request to end the run. `state`: final state for summary.json."""

    reason: str
    state: StopState = "stopped"


class Drain(Message):
    """Request to start a drain: the broker grants no leases and recalls the samples in generation, until a `Drain` with
    `on` false. A drain survives restarts."""

    on: bool = True


class DeadLettersRequest(Message):
    pass


class DeadLetters(Message):
    """Answer to `DeadLettersRequest`. One uint8 array: the dead letters, samples that failed for good, as JSON."""


class Requeue(Message):
    """Request to draw the prompts of these discarded groups again; an empty list means every dead group that can be
    redrawn."""

    groups: list[int] = []


class Requeued(Message):
    """Answer to `Requeue`. `groups`: ids of the groups that the request has re-queued."""

    groups: list[int]
