"""Snapshots of the ledger's whole state at one journal position, so that a restart need not replay from the start.

`freeze` and `thaw` turn a ledger into bytes and back: a `LedgerImage`, then each group with its samples, each prefixed
by its length. A `SnapshotStore` keeps the two newest snapshots on disk. The journal remains the truth: a damaged
snapshot is skipped.
"""

import contextlib
import logging
import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from zlib_ng.zlib_ng import crc32

from april.broker.ledger.dead_letters import DeadLetterQueue
from april.broker.ledger.events import RunStarted
from april.broker.ledger.samples import UNFINISHED, AgentSample, Group, GroupState, Lease, Sample, SampleState
from april.broker.ledger.state import LedgerState
from april.util.files import sync

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
TEMPORARY = ".partial"
"""Suffix of a snapshot file while it is written. The file is named by the writer's process id, so that no process
mistakes the file of a killed process for its own."""
LENGTH = struct.Struct("<I")
"""Layout of the length prefix of each piece of a frozen ledger, bytes."""
HEAD = struct.Struct("<4sI")
"""Layout of a snapshot file's header: format, and crc32 of everything after the header."""
FORMAT = b"APSC"

PLAIN = (
    "next_step", "consumed", "frontier", "durable", "incarnation", "dead_in_a_row", "last_error", "round", "round_open",
    "watermark", "cursor", "starts", "learner_uid", "weights_address", "weights_key", "_next_group", "_next_ordinal",
    "last_lease_id", "draining", "evaluated", "now", "prompts_submitted", "submitted",
)  # fmt: skip
"""Attributes of the ledger that a snapshot stores without conversion."""
COUNTERS = ("tokens", "discarded", "counts", "resumed")
"""Attributes of the ledger that are Counters, stored as dictionaries."""


GROUP_FIELDS = [field.name for field in fields(Group) if field.name not in ("samples", "pending_samples")]
LEASE_FIELDS = (
    "sample.group.id", "sample.index", "sample.fork_number",
    "id", "worker", "step", "scoring", "agent", "turn_completed",
)  # fmt: skip


class LedgerImage(msgspec.Struct, array_like=True):
    """The ledger's state without its groups; groups are referred to by id."""

    header: RunStarted | None
    plain: dict[str, Any]
    counters: dict[str, dict[str, int]]
    ready: list[int]
    deliveries: dict[int, list[int]]
    evaluations: dict[int, list[int]]
    leases: list[tuple[int, int, int, int, str, int, bool, bool, bool]]
    """Each lease as the values of `LEASE_FIELDS`."""
    cohorts: tuple[int, dict[int, int], dict[int, int], dict[int, dict[int, tuple[list[int], list[int]]]]]
    dead_letters: DeadLetterQueue
    attachment: bytes
    """State of components outside the ledger that follow its events, in an encoding of their own."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LedgerImage)
_of_group, _of_lease = attrgetter(*GROUP_FIELDS), attrgetter(*LEASE_FIELDS)


def freeze(ledger: LedgerState, attachment: bytes = b"") -> bytearray:
    """The ledger's state as bytes, with the state of other components in `attachment`.

    The result is one large buffer, which is returned to the system when freed; many small ones would fragment the heap.
    """
    complete = [group for groups in ledger.evaluations.values() for group in groups if group.id not in ledger.groups]
    image = bytearray()
    _append(image, _freeze_head(ledger, attachment))
    for group in (*complete, *ledger.groups.values()):
        _append(image, (_of_group(group), [_of_sample(sample) for sample in group.samples]))
    return image


def _append(image: bytearray, piece: Any) -> None:
    start = len(image)
    image += LENGTH.pack(0)
    _encoder.encode_into(piece, image, -1)
    LENGTH.pack_into(image, start, len(image) - start - LENGTH.size)


def _pieces(image: memoryview) -> Iterator[memoryview]:
    end = 0
    while end < len(image):
        (length,) = LENGTH.unpack_from(image, end)
        start, end = end + LENGTH.size, end + LENGTH.size + length
        yield image[start:end]


def _freeze_head(ledger: LedgerState, attachment: bytes) -> LedgerImage:
    cohorts = ledger.cohorts
    return LedgerImage(
        ledger.header,
        {name: getattr(ledger, name) for name in PLAIN},
        {name: dict(getattr(ledger, name)) for name in COUNTERS},
        [group.id for group in ledger.ready],
        {step: [group.id for group in groups] for step, groups in ledger.deliveries.items()},
        {step: [group.id for group in groups] for step, groups in ledger.evaluations.items()},
        list(map(_of_lease, ledger.leases.values())),
        (cohorts.settled, cohorts.created, cohorts.trained, cohorts.waiting),
        ledger.dead_letters,
        attachment,
    )


def _of_sample(sample: Sample) -> tuple[Any, ...]:
    """The fields of a sample in order, without group and index. The last value is the list of its forks or, for a fork,
    (fork number, parent fork, shared tokens)."""
    fork = sample.fork_number, sample.parent_fork, sample.shared_tokens
    return (
        sample.state, sample.length, sample.chunks, sample.unsampled, sample.last_step, sample.lease_id,
        sample.attempts, sample.reward, sample.finish_reason, sample.last_error, sample.details, sample.cache_worker,
        sample.agent_lease, sample.agent_state, fork if sample.main_sample else list(map(_of_sample, sample.forks)),
    )  # fmt: skip


def thaw(frozen: bytes | bytearray | memoryview, ledger: LedgerState) -> bytes:
    """Restore the frozen state into an empty ledger; returns the attachment."""
    head, *rest = _pieces(memoryview(frozen))
    image, agents = _decoder.decode(head), ledger.rules.agents
    groups = {group.id: group for group in (_group(piece, agents) for piece in rest)}
    ledger.header = image.header
    for name in PLAIN:
        setattr(ledger, name, image.plain[name])
    epoch, row = ledger.cursor
    ledger.cursor = epoch, row
    for name in COUNTERS:
        getattr(ledger, name).update(image.counters.get(name, {}))
    cohorts = ledger.cohorts
    cohorts.settled, created, trained, cohorts.waiting = image.cohorts
    cohorts.created, cohorts.trained = Counter(created), Counter(trained)
    ledger.dead_letters = image.dead_letters
    for number in image.ready:
        ledger.ready.add(groups[number])
    ledger.unfiltered = list(ledger.ready) if ledger.rules.filtered else []
    ledger.deliveries = {step: [groups[number] for number in numbers] for step, numbers in image.deliveries.items()}
    ledger.evaluations = {step: [groups[number] for number in numbers] for step, numbers in image.evaluations.items()}
    for number, index, fork_number, lease_id, worker, step, scoring, agent, turn_completed in image.leases:
        sample = groups[number].samples[index].find_fork(fork_number)
        assert sample
        lease = Lease(lease_id, sample, worker, step, scoring, float("inf"), agent=agent, turn_completed=turn_completed)
        ledger.hold(lease)
    for group in groups.values():
        if not group.evaluation or group.state is GroupState.OPEN:
            ledger.groups[group.id] = group
        if not group.evaluation and group.state in (GroupState.OPEN, GroupState.READY):
            ledger.bound.add(group.opened_at)
        if group.state is GroupState.OPEN:
            ledger.open_samples.add(group)
            for sample in group.samples_with_forks:
                if sample.state in (*UNFINISHED, SampleState.GENERATED):
                    ledger.push(sample)
    return image.attachment


def header_of(frozen: bytes | bytearray | memoryview) -> RunStarted | None:
    """The journal's first record, with the run's settings, as stored in a frozen ledger."""
    return _decoder.decode(next(_pieces(memoryview(frozen)))).header


def _group(frozen: memoryview, agents: bool) -> Group:
    values, samples = msgspec.msgpack.decode(frozen)
    group = Group(**dict(zip(GROUP_FIELDS, values, strict=True)))
    group.state, group.prompt = GroupState(group.state), group.prompt and tuple(group.prompt)
    thawed = _session if agents else _sample
    group.samples = [thawed(group, index, *values) for index, values in enumerate(samples)]
    return group


def _sample(group: Group, index: int, state: str, *rest: Any) -> Sample:
    """Restore a sample of a run without agents from the values of `_of_sample`."""
    *plain, _agent_lease, _agent_state, _forks = rest
    return Sample(group, index, SampleState(state), *plain)


def _session(group: Group, index: int, state: str, *rest: Any, main_sample: Sample | None = None) -> AgentSample:
    """Restore an agent session from the values of `_of_sample`: its main sample with its forks, or one fork."""
    *plain, forks = rest
    sample = AgentSample(group, index, SampleState(state), *plain)
    sample.main_sample = main_sample
    if main_sample:
        sample.fork_number, sample.parent_fork, sample.shared_tokens = forks
    else:
        sample.forks = tuple(_session(group, index, *values, main_sample=sample) for values in forks)
    return sample


def live_positions(ledger: LedgerState) -> Iterator[int]:
    """Positions of the journal records with prompts and tokens that the ledger may still need."""
    for position, _ in ledger.submitted.values():
        yield position
    for group in ledger.groups.values():
        yield group.prompt[0]
        for sample in group.samples_with_forks:
            for ref in sample.chunk_refs:
                yield ref.record


class SnapshotStore:
    """The snapshots on disk, in the journal's folder, named by their positions."""

    def __init__(self, folder: Path):
        self.folder = folder

    def positions(self) -> list[int]:
        """Positions of the snapshots on disk, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}"))

    def newest_first(self) -> Iterator[tuple[int, memoryview]]:
        """(position, frozen ledger) of each whole snapshot, newest first."""
        for position in reversed(self.positions()):
            data = memoryview(self._path(position).read_bytes())
            frozen = data[HEAD.size :]
            if frozen and data[: HEAD.size] == HEAD.pack(FORMAT, crc32(frozen)):
                yield position, frozen
            else:
                log.warning("snapshot %s is damaged, or of another April, and passed over", self._path(position))

    def write(self, position: int, frozen: bytearray, previous: int | None = None) -> None:
        """Write a snapshot, and delete all earlier ones but one: the fallback in case the new snapshot is damaged.

        The fallback is the snapshot at `previous`, which was read back successfully, or else the newest earlier one.
        Raises OSError, with the earlier snapshots unchanged.
        """
        for leftover in self.folder.glob(f"*{TEMPORARY}"):
            leftover.unlink(missing_ok=True)
        temporary = self.folder / f"{os.getpid()}{TEMPORARY}"
        try:
            with temporary.open("xb") as file:
                file.write(HEAD.pack(FORMAT, crc32(frozen)))
                file.write(frozen)
                file.flush()
                os.fdatasync(file.fileno())
            temporary.rename(self._path(position))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync(self.folder)
        earlier = [other for other in self.positions() if other < position]
        for other in earlier:
            if other != (earlier[-1] if previous is None else previous):
                self._path(other).unlink()

    def _path(self, position: int) -> Path:
        return self.folder / f"{position:020d}{SUFFIX}"
