"""How one part of a version goes over a link of a weight channel: whole or, to a worker that keeps the version before,
as what has changed in it since (`deltas.py`). A link carries a delta as its length, uint64, and its bytes.

sent = bases.followed_by(part)                          # on the learner, for each version
send_part(link, sent, bucket_bytes, deadline, as_delta=True)
tensors = receive_delta(link, part, bucket_bytes, base, buffers, deadline)          # in the worker
"""

import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from april.weights.channel import DeltaBase, WeightChannel, WeightPart
from april.weights.deltas import apply_delta, delta_pieces
from april.weights.snapshot import (
    ReusedBuffers,
    Snapshot,
    SnapshotError,
    buckets,
    empty_buffer,
    joint_digest,
    outgoing,
    unpack,
    verify,
)
from april.weights.transports import Link

LENGTH = struct.Struct("<Q")
SPARE_BYTES = 2**20
"""How much longer a delta may be than its part: it has a header, and what does not compress gets a little longer."""


# --- on the learner ---------------------------------------------------------------------------------------------------


class PartDelta:
    """What has changed in a part since the version before. It is computed when the first link needs it, and then lies
    ready for all."""

    def __init__(self, base: Snapshot):
        self.base = DeltaBase(base.version, joint_digest(base.parts))
        self._old: Snapshot | None = base
        self._encoded = torch.empty(0, dtype=torch.uint8)
        self._encoding = threading.Lock()

    def encoded(self, part: Snapshot) -> Tensor:
        """The delta that turns the base into `part`, uint8 [bytes]."""
        with self._encoding:
            if self._old:
                old = unpack(self._old.heads, self._old.data)
                content = bytearray().join(delta_pieces(part.heads, unpack(part.heads, part.data), old))
                self._encoded, self._old = torch.frombuffer(content, dtype=torch.uint8), None
        return self._encoded


@dataclass(frozen=True)
class SnapshotWithDelta(Snapshot):
    """A part of a version whose rank has kept its part of the version before."""

    delta: PartDelta = field(kw_only=True)


class DeltaBases:
    """Gives each version that a rank publishes its delta to the version before."""

    def __init__(self, delta: str):
        """`delta`: `weights.delta`."""
        self.are_kept = delta != "off"
        self._last: Snapshot | None = None

    def followed_by(self, part: Snapshot) -> Snapshot:
        """This rank's part of the next version, with its delta. An adapter has none, since it is small."""
        last, self._last = self._last, part if self.are_kept and not part.adapter else None
        if last is None or self._last is None or last.version == part.version:
            return part
        return SnapshotWithDelta(**vars(part), delta=PartDelta(last))


def delta_base_for(channel: WeightChannel, snapshot: Snapshot) -> DeltaBase | None:
    """The weights to which a worker is sent a delta; None if it keeps others or none, or is a server."""
    if channel.server_ranks or not isinstance(snapshot, SnapshotWithDelta):
        return None
    base = snapshot.delta.base
    return base if (channel.acknowledged, channel.digest) == (base.version, base.digest) else None


def send_part(
    link: Link, part: Snapshot, bucket_bytes: int, deadline: float, *, to_server: bool = False, as_delta: bool = False
) -> None:
    """Send a part by `deadline` (Unix time, seconds). Raises RuntimeError or OSError."""
    if not as_delta:
        return link.send(outgoing(part, bucket_bytes, to_server), deadline)
    if not isinstance(part, SnapshotWithDelta):
        raise RuntimeError(f"this rank has no version before {part.version}")
    content = part.delta.encoded(part)
    link.send([torch.frombuffer(bytearray(LENGTH.pack(len(content))), dtype=torch.uint8)], deadline)
    link.send(buckets(content, bucket_bytes), deadline)
    return None


# --- in the worker ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptWeights:
    """The weights that a worker received last, which it keeps as the base of the next delta."""

    name: DeltaBase
    tensors: Mapping[str, Tensor]


def receive_whole(link: Link, part: WeightPart, bucket_bytes: int, data: Tensor, deadline: float) -> dict[str, Tensor]:
    """Receive a whole part into `data`, check it, and return its tensors by name. Raises RuntimeError or OSError."""
    link.receive(buckets(data, bucket_bytes), deadline)
    verify(data, part.digest)
    return unpack(part.tensors, data)


def receive_delta(
    link: Link, part: WeightPart, bucket_bytes: int, base: KeptWeights, buffers: ReusedBuffers, deadline: float
) -> dict[str, Tensor]:
    """Receive the delta of a part, apply it to `base`, check the result, and return it by name. Raises RuntimeError or
    OSError."""
    length = torch.zeros(LENGTH.size, dtype=torch.uint8)
    link.receive([length], deadline)
    (size,) = LENGTH.unpack(length.numpy().tobytes())
    if size > part.total_bytes + part.total_bytes // 64 + SPARE_BYTES:
        raise SnapshotError(f"a delta of {size} bytes is announced for {part.total_bytes} bytes of weights")
    data = empty_buffer(size)
    link.receive(buckets(data, bucket_bytes), deadline)
    return apply_delta(data, base.tensors, buffers, part)
