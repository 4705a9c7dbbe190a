"""Messages of every peer of the broker, whatever its role (opening, keeping and ending a session), and messages of
monitors."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from april.wire.message import Message, Name, Number, Seconds
from april.wire.training import WeightFolder

DENIED = "access denied: "
"""Beginning of the reason in a `Refused` that tells a peer not to try again: its key does not permit what it asks
for."""


class Hello(Message):
    """First message of a peer, on its data connection. `lease_ids`: leases that the peer still works on."""

    role: str
    name: Name
    uid: Name
    lease_ids: list[int] = []
    acknowledged_tokens: Number = 0
    """Number of tokens sampled by this process whose acknowledgement by the broker has reached it."""


class Welcome(Message):
    """Answer to `Hello`: the session is open."""

    session: int
    run: str
    broker_start: int
    """Number of times that the broker of this run has started, this start included."""
    round: int
    watermark: int
    """Highest lease id that the last `Abort` recalled: leases up to it are to be handed back."""
    lost_lease_ids: list[int]
    """Leases listed in `Hello` that the peer no longer holds."""
    renew_s: float
    """Interval at which the peer has to send heartbeats that list all its leases, seconds."""
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
    """Number of tokens that the peer has sampled since its process started."""
    received_bytes: Number = 0
    """Bytes of arrays that the peer has received in this session: the broker sends on only while a limited number of
    bytes is not confirmed by this count."""
    loop_position: Name = ""
    """Stage that the peer's main loop is in, such as "decoding"; "" if not reported."""
    loop_elapsed_s: Seconds = 0.0
    """Seconds for which the main loop has been in the stage `loop_position` without a break."""
    loop_usual_s: Seconds = 0.0
    """Median duration of the main loop's earlier stays in the stage `loop_position`, seconds; 0 if unknown."""
    slots: Slots | None = None
    """What a worker's samples wait for or do at the moment; None from other peers, or if not reported."""


class Renewed(Message):
    """Answer to a `Heartbeat` that lists leases. `lost_lease_ids`: those of them that the peer no longer holds."""

    lost_lease_ids: list[int]


class Goodbye(Message):
    pass


class Refused(Message):
    """Answer to a message that the broker does not accept, with the reason; no other answer to that message follows."""

    reason: str
    lease_id: int = 0
    """Always 0; used by older protocol versions."""


class Stop(Message):
    """Tells a peer to finish and leave, because the run is over or another process has taken the peer's role and
    name."""

    reason: str


# --- images -----------------------------------------------------------------------------------------------------------


MAX_IMAGES_ASKED = 64
"""Maximum number of names in one `FetchImages`."""


class FetchImages(Message):
    """A worker's or the learner's request for images. `names`: the sha256 of each file in hex."""

    names: list[Name]


class Images(Message):
    """Answer to `FetchImages`, which may be partial: it has the first of the requested images, at least one, and the
    peer asks again for the others. One uint8 array for each, its PNG file; an empty array for an image that cannot be
    read."""

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
"""Maximum number of bytes of an image in one message."""


def image_parts(name: str, png: bytes) -> Iterator[tuple[KeepImage, list[np.ndarray]]]:
    """The messages, with their arrays, that upload the file `png` of an image; the broker answers the last one."""
    for start in range(0, len(png), IMAGE_PART_BYTES):
        yield KeepImage(name, start, len(png)), [np.frombuffer(png[start : start + IMAGE_PART_BYTES], np.uint8)]


class ImageKept(Message):
    """Answer to the last `KeepImage` (part) of an image: the image is on the broker's disk, and stays there at least
    ten minutes even if no turn or prompt names it; or `fault` says why not."""

    name: str
    fault: str = ""
    """Reason why the broker could not keep the image; "" if it keeps it."""


# --- monitors ---------------------------------------------------------------------------------------------------------


StopState = Literal["stopped", "failed"]


class StatusRequest(Message):
    pass


class Status(Message):
    """Answer to `StatusRequest`. One uint8 array: the status of the run as JSON."""


class StopRun(Message):
    """Request to end the run. `state`: the run's final state, as it will be written to summary.json."""

    reason: str
    state: StopState = "stopped"


class Drain(Message):
    """Request to begin a drain: the broker grants no leases, and recalls the samples that are being generated. A
    `Drain` with `on` false ends it. A drain survives restarts of the broker."""

    on: bool = True


class DeadLettersRequest(Message):
    pass


class DeadLetters(Message):
    """Answer to `DeadLettersRequest`. One uint8 array: the dead letters, samples that failed for good, as JSON."""


class Requeue(Message):
    """Request to draw the prompts of discarded groups again. `groups`: their ids; an empty list means all groups that
    were discarded for a failed sample and whose prompts can be drawn again."""

    groups: list[int] = []


class Requeued(Message):
    """Answer to `Requeue`. `groups`: ids of the groups that the request has re-queued."""

    groups: list[int]
