"""How one part of a version goes over a link of a weight channel: whole or, to a worker that keeps the version before,
as what has changed in it since (`deltas.py`). A link carries a delta as its length, uint64, and its bytes; after a
length of 0 the part comes whole.

sent = bases.followed_by(part)                          # on the learner, for each version
prepare_delta(sent)                                     # while no deadline runs
send_part(link, sent, bucket_bytes, deadline, as_delta=True)
data = receive_delta(link, part, bucket_bytes, base, buffers, deadline)             # in the worker
"""

import contextlib
import logging
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from april.weights.channel import DeltaBase, TensorHead, WeightChannel, WeightPart
from april.weights.deltas import apply_delta, delta_pieces
from april.weights.snapshot import (
    ArrivingDigest,
    ReusedBuffers,
    Snapshot,
    SnapshotError,
    buckets,
    check,
    checksums_in_server,
    digest,
    empty_buffer,
    joint_checksum,
    on_threads,
    outgoing,
    unpack,
    verify,
)
from april.weights.transports import Link, Received

log = logging.getLogger(__name__)

Packed: TypeAlias = tuple[list[TensorHead], Tensor]
"""Tensors by name, dtype and shape, and the buffer, uint8 [bytes], that holds them one after the other."""
Forwarding: TypeAlias = "AbstractContextManager[Received | None]"
LENGTH = struct.Struct("<Q")
VERIFY_EVERY = 20
"""Interval, in transfers, at which the weights in an inference server are verified, beginning with its first
transfer."""
NONE = torch.empty(0, dtype=torch.uint8)
"""An empty tensor that stands for "there is no delta"."""
SPARE_BYTES = 2**20
"""A worker refuses a delta that is longer than its part by more than this many bytes and a 64th of the part. Longer it
may be: it has a header, and values that do not compress get a little longer."""


# --- on the learner ---------------------------------------------------------------------------------------------------


class PartDelta:
    """Delta of a rank's part of a version to the part of the version before (the base). It is computed when the first
    link needs it, and then kept for all links. The base is kept in memory until then, or until `release`."""

    def __init__(self, base: Snapshot):
        self.base = DeltaBase(base.version, joint_checksum(base.parts))
        self.digest = ""
        """SHA-256 of the delta in hex; "" until it is computed."""
        self._old: Snapshot | None = base
        self._encoded = NONE
        self._encoding = threading.Lock()

    def encoded(self, part: Snapshot) -> Tensor:
        """The delta that turns the base into `part`, uint8 [bytes]; `NONE` if it would be longer than the part, or the
        base is released."""
        with self._encoding:
            if self._old:
                old = unpack(self._old.heads, self._old.data)
                new = unpack(part.heads, part.data)
                content = bytearray().join(delta_pieces(part.heads, new, old, checked=False))
                shorter = len(content) < part.data.numel()
                self._encoded, self._old = torch.frombuffer(content, dtype=torch.uint8) if shorter else NONE, None
                self.digest = digest(self._encoded)
        return self._encoded

    def release(self) -> None:
        """Drop the base to free its memory. If the delta has not been computed by then, links send the part whole."""
        if self._encoding.acquire(blocking=False):  # otherwise it is being computed, and then dropped
            self._old = None
            self._encoding.release()


@dataclass(frozen=True)
class SnapshotWithDelta(Snapshot):
    """A rank's part of a version, with its delta to the rank's part of the version before."""

    delta: PartDelta = field(kw_only=True)


class DeltaBases:
    """Keeps the version that a rank has published last, so that the next one can be sent as a delta to it."""

    def __init__(self, delta: str):
        """`delta`: value of `weights.delta`."""
        self.are_kept = delta != "off"
        self._last: Snapshot | None = None
        self._delta: PartDelta | None = None

    def followed_by(self, part: Snapshot, channels: Iterable[WeightChannel] | None = None) -> Snapshot:
        """This rank's part of the next version, with a delta to the last version where one is of use: not for an
        adapter, which is small, and not if no worker of `channels` may have kept the last version (None: assume that
        one has)."""
        last, self._last = self._last, part if self.are_kept and not part.adapter else None
        self._delta = None
        if last is None or self._last is None or last.version == part.version:
            return part
        delta = PartDelta(last)
        if channels is not None and not any(may_keep(channel, delta.base) for channel in channels):
            return part
        self._delta = delta
        return SnapshotWithDelta(**vars(part), delta=delta)

    def release(self) -> None:
        """Free the memory of the version before the newest, before the next version is gathered. If no link has
        computed the delta between these two yet, the newest version is sent whole from now on."""
        delta, self._delta = self._delta, None
        if delta:
            delta.release()

    def may_follow(self, snapshot: Snapshot) -> bool:
        """Whether the next version may be sent as a delta to `snapshot`, so that workers should keep `snapshot`."""
        return self._last is not None and self._last.version == snapshot.version


def may_keep(channel: WeightChannel, base: DeltaBase) -> bool:
    """Whether the worker of a channel keeps the weights `base` for deltas, or is receiving them now and may keep
    them."""
    is_receiving = channel.posted == base.version != channel.acknowledged
    is_held = (channel.acknowledged, channel.digest) == (base.version, base.digest)
    return not channel.server_ranks and (is_held or is_receiving)


def delta_base_for(channel: WeightChannel, snapshot: Snapshot) -> DeltaBase | None:
    """The weights to which a worker is sent `snapshot` as a delta; None if it gets all of it: the worker does not keep
    these weights, or an inference server receives in its stead."""
    if channel.server_ranks or not isinstance(snapshot, SnapshotWithDelta):
        return None
    base = snapshot.delta.base
    return base if (channel.acknowledged, channel.digest) == (base.version, base.digest) else None


def prepare_delta(part: Snapshot) -> Tensor:
    """The delta of a part, uint8 [bytes], which is computed by the first call; `NONE` if the part is to be sent whole.

    It may take long, so call it before a deadline runs or a worker waits."""
    return part.delta.encoded(part) if isinstance(part, SnapshotWithDelta) else NONE


def as_sent(snapshot: Snapshot, as_delta: bool) -> list[WeightPart]:
    """Descriptions of all parts of a version, this rank's first. With `as_delta` this rank's description has the
    SHA-256 of its delta, if there is one. All others have the SHA-256 of the whole part, since a rank has only its own
    delta."""
    if as_delta and len(prepare_delta(snapshot)) and isinstance(snapshot, SnapshotWithDelta):
        return [structs.replace(snapshot.part, delta_digest=snapshot.delta.digest), *snapshot.others]
    return [snapshot.hashed_part, *snapshot.others]


def send_part(
    link: Link, part: Snapshot, bucket_bytes: int, deadline: float, *, to_server: bool = False, as_delta: bool = False
) -> int:
    """Send a part by `deadline` (Unix time, seconds), in buckets of at most `bucket_bytes`; returns the bytes of
    weights that were sent. `to_server`: whether an inference server receives. `as_delta`: whether to send the part's
    delta, if it has one. Raises RuntimeError or OSError."""
    if as_delta:
        content = prepare_delta(part)
        link.send([torch.frombuffer(bytearray(LENGTH.pack(len(content))), dtype=torch.uint8)], deadline)
        if len(content):
            link.send(buckets(content, bucket_bytes), deadline)
            return len(content)
    link.send(outgoing(part, bucket_bytes, to_server), deadline)
    return part.data.numel()


def expected_in_server(channel: WeightChannel, snapshot: Snapshot) -> dict[str, str]:
    """Expected checksums of the inference server's tensors, by name. They are given for the first and every
    `VERIFY_EVERY`-th later transfer over a channel, if they can be predicted; otherwise the result is empty. The call
    counts as one transfer."""
    due = channel.transfers % VERIFY_EVERY == 0
    channel.transfers += 1
    if not due or not channel.server_ranks or channel.backend != "gloo":
        return {}
    if snapshot.others:
        return dict(snapshot.server_checksums)
    return checksums_in_server(unpack(snapshot.heads, snapshot.data))


def copies_sent(channel: WeightChannel) -> int:
    """How many times rank 0 itself sends the bytes of a broadcast. gloo broadcasts along a binomial tree, whose root
    sends one copy for each doubling of the group."""
    return max(1, channel.server_ranks.bit_length()) if channel.backend == "gloo" else 1


# --- in the worker ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptWeights:
    """The weights that a worker received last, which it keeps as the base of the next delta."""

    name: DeltaBase
    tensors: Mapping[str, Tensor]
    buffers: Sequence[tuple[list[TensorHead], Tensor, "weakref.ref[np.ndarray]"]] = ()
    """For each part: its tensors, the buffer in which they lie, and a weak reference that is dead once nobody else uses
    them."""

    @classmethod
    def lend(cls, name: DeltaBase, parts: Sequence[Packed]) -> tuple[Self, dict[str, Tensor]]:
        """(the kept weights, their tensors by name). The tensors are for an engine, which may use them as long as it
        likes; the kept weights know when it no longer does. `name`: version and checksum of the weights. `parts`: all
        parts of the version."""
        views = [data.numpy() for _, data in parts]
        buffers = [(heads, data, weakref.ref(view)) for (heads, data), view in zip(parts, views, strict=True)]
        lent = [(heads, torch.from_numpy(view)) for (heads, _), view in zip(parts, views, strict=True)]
        return cls(name, unpack_all(parts), buffers), unpack_all(lent)

    def own_buffer(self, heads: list[TensorHead]) -> Tensor | None:
        """The buffer that holds the part with these tensors (`heads`), if the engine no longer uses it, so that a delta
        may overwrite it; otherwise None."""
        return next((data for its, data, lent in self.buffers if its == heads and lent() is None), None)


def unpack_all(parts: Iterable[Packed]) -> dict[str, Tensor]:
    """The tensors of several parts, by name, as views of their buffers."""
    return {name: tensor for heads, data in parts for name, tensor in unpack(heads, data).items()}


MOST_WHOLE = 64
"""Limit of `DeltaRetry`: most versions in a row that a worker has sent whole before it tries a delta again."""


class DeltaRetry:
    """Decides when a worker accepts deltas again after one has failed. That version is sent whole, and so is the next
    one; after a second failure the next two are, then four and so on. A delta that succeeds resets this."""

    def __init__(self) -> None:
        self._pause = self._whole_versions = 0

    def failed(self, base: DeltaBase, why: object) -> None:
        """Note that a delta to `base` could not be received or applied, for the reason `why`, which is logged."""
        self._pause = self._whole_versions = min(2 * self._pause or 1, MOST_WHOLE)
        log.warning(
            "a delta to %s has failed: %s; it and %d versions after it come whole",
            base.version,
            why,
            self._whole_versions,
        )

    def takes_next(self, was_delta: bool) -> bool:
        """Note that a version has arrived, as a delta if `was_delta`; returns whether the next version may come as a
        delta to it."""
        if was_delta:
            self._pause = 0
        self._whole_versions, was_left = max(0, self._whole_versions - 1), self._whole_versions
        return not was_left


def receive(link: Link, expected: Iterable[Tensor], deadline: float, received: "Received | None") -> None:
    """Receive the buckets `expected` in place by `deadline` (Unix time, seconds), and pass each to `received`, if
    given."""
    if received:
        link.receive_each(expected, deadline, received)
    else:
        link.receive(expected, deadline)


def receive_whole(
    link: Link, part: WeightPart, bucket_bytes: int, data: Tensor, deadline: float, forwarding: Forwarding
) -> Packed:
    """Receive a whole part into `data`, uint8 [total bytes], by `deadline` (Unix time, seconds), and check it.
    `forwarding`: context whose function forwards each bucket to the next worker of a chain. Raises RuntimeError or
    OSError."""
    with on_threads() as submit:
        arriving = ArrivingDigest(data, submit)
        with forwarding as forward:

            def received(bucket: Tensor) -> None:
                if forward:
                    forward(bucket)
                arriving.add(bucket)

            link.receive_each(buckets(data, bucket_bytes), deadline, received)
        check(arriving.result(), part.digest)
    return part.tensors, data


def receive_delta(
    link: Link,
    part: WeightPart,
    bucket_bytes: int,
    base: KeptWeights,
    buffers: ReusedBuffers,
    deadline: float,
    forwarding: Forwarding,
) -> Packed:
    """Receive the delta of a part by `deadline` (Unix time, seconds), check it, apply it to the kept weights `base`,
    and check the result: the part's tensors with their buffer, that of `base` if nobody else uses it, else one of
    `buffers`. If the sender has no delta, the part comes whole. `forwarding`: context whose function forwards each
    bucket to the next worker of a chain. Raises RuntimeError or OSError."""
    length = torch.zeros(LENGTH.size, dtype=torch.uint8)
    with forwarding as received:
        receive(link, [length], deadline, received)
        (size,) = LENGTH.unpack(length.numpy().tobytes())
        if not size:
            whole = buffers.take(part.total_bytes)
            return receive_whole(link, part, bucket_bytes, whole, deadline, contextlib.nullcontext(received))
        if size > part.total_bytes + part.total_bytes // 64 + SPARE_BYTES:
            raise SnapshotError(f"a delta of {size} bytes is announced for {part.total_bytes} bytes of weights")
        data = empty_buffer(size)
        receive(link, buckets(data, bucket_bytes), deadline, received)
    if part.delta_digest:
        verify(data, part.delta_digest)
    return apply_delta(data, base.tensors, buffers, part, base.own_buffer(part.tensors))
