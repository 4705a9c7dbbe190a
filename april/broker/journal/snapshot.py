"""Snapshots of the ledger's whole state at one journal position, so that a restart need not replay from the start.

`freeze` and `thaw` turn a ledger into bytes and back: a `LedgerImage`, then each group with its samples, each prefixed
by its length. A `SnapshotStore` keeps the two newest snapshots on disk. The journal remains the truth: a damaged
snapshot is skipped.
"""

import contextlib
import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from zlib_ng.zlib_ng import crc32

from april.broker.ledger.batches import LengthCohorts
from april.broker.ledger.dead_letters import DeadLetterQueue
from april.broker.ledger.events import RunStarted
from april.broker.ledger.prompt_cursor import PromptCursor
from april.broker.ledger.row_tallies import RowTallies
from april.broker.ledger.samples import UNFINISHED, AgentSample, Group, GroupState, Lease, Sample, SampleState
from april.broker.ledger.state import (
    Account,
    CurrentLearner,
    LedgerState,
    Rounds,
    Serials,
    StepProgress,
)
from april.util.files import read_whole, sync

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
FILE_NAME = re.compile(r"\d{20}" + re.escape(SUFFIX))
TEMPORARY = ".partial"
"""Suffix of a snapshot file while it is written. The rest of its name is the writer's process id, so that no process
mistakes the file of a killed process for its own."""
LENGTH = struct.Struct("<I")
"""Layout of a length in bytes: it precedes each piece (the `LedgerImage`, then each group) in what `freeze` returns."""
HEAD = struct.Struct("<4sI")
"""Layout of a snapshot file's header: format, and crc32 of everything after the header."""
FORMAT = b"APSC"


class Parts(msgspec.Struct, array_like=True):
    """The parts of the ledger's state that are stored as they are: the attributes of `LedgerState` with these names."""

    header: RunStarted | None
    now: float
    account: Account
    serials: Serials
    prompts: PromptCursor
    steps: StepProgress
    learner: CurrentLearner
    rounds: Rounds
    dead_letters: DeadLetterQueue
    cohorts: LengthCohorts
    tallies: RowTallies
    evaluated: dict[int, dict[str, Any]]
    recorded: dict[int, tuple[int, int]]


class LeaseImage(msgspec.Struct, array_like=True):
    """A lease as a snapshot stores it: its fields, with its sample given by group id, index in the group and fork
    number."""

    group: int
    index: int
    fork_number: int
    id: int
    worker: str
    step: int
    scoring: bool
    agent: bool
    turn_completed: bool


class LedgerImage(msgspec.Struct, array_like=True):
    """The ledger's state without its groups; groups are referred to by id."""

    parts: Parts
    ready: list[int]
    deliveries: dict[int, list[int]]
    evaluations: dict[int, list[int]]
    leases: list[LeaseImage]
    attachment: bytes
    """State of components outside the ledger that follow its events, in an encoding of their own."""


def _names(kind: type, without: str) -> list[str]:
    return [field.name for field in fields(kind) if field.name not in without.split()]


GROUP_FIELDS = _names(Group, without="samples pending_samples")
SAMPLE_FIELDS = _names(Sample, without="group index")
SESSION_FIELDS = _names(AgentSample, without="group index forks main_sample")
"""Names of the fields that a snapshot stores of each group (GROUP_FIELDS), sample (SAMPLE_FIELDS) and agent session, in
order; a session is followed by its forks."""

_encoder = msgspec.msgpack.Encoder(enc_hook=list)
_decoder = msgspec.msgpack.Decoder(LedgerImage, dec_hook=lambda kind, stored: kind(stored))
_of_group, _of_sample, _of_session = (attrgetter(*names) for names in (GROUP_FIELDS, SAMPLE_FIELDS, SESSION_FIELDS))


def freeze(ledger: LedgerState, attachment: bytes = b"") -> bytearray:
    """The ledger's state as bytes. They include `attachment`, the encoded state of components outside the ledger.

    The result is one large buffer, which is returned to the system when freed; many small ones would fragment the heap.
    """
    complete = [group for groups in ledger.evaluations.values() for group in groups if group.id not in ledger.groups]
    head = LedgerImage(
        Parts(*(getattr(ledger, name) for name in Parts.__struct_fields__)),
        [group.id for group in ledger.ready],
        {step: [group.id for group in groups] for step, groups in ledger.deliveries.items()},
        {step: [group.id for group in groups] for step, groups in ledger.evaluations.items()},
        list(map(_lease_image, ledger.leases.values())),
        attachment,
    )
    image = bytearray()
    _append(image, head)
    for group in (*complete, *ledger.groups.values()):
        _append(image, (_of_group(group), list(map(_sample_values, group.samples))))
    return image


def _lease_image(lease: Lease) -> LeaseImage:
    sample = lease.sample
    return LeaseImage(
        sample.group.id, sample.index, sample.fork_number,
        lease.id, lease.worker, lease.step, lease.scoring, lease.agent, lease.turn_completed,
    )  # fmt: skip


def _sample_values(sample: Sample) -> tuple[Any, ...]:
    if isinstance(sample, AgentSample):
        return *_of_session(sample), list(map(_of_session, sample.forks))
    return _of_sample(sample)


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


def thaw(frozen: bytes | bytearray | memoryview, ledger: LedgerState) -> bytes:
    """Restore a state that `freeze` returned (`frozen`) into an empty ledger; returns the attachment given to
    `freeze`."""
    head, *rest = _pieces(memoryview(frozen))
    image, agents = _decoder.decode(head), ledger.rules.agents
    groups = {group.id: group for group in (_group(piece, agents) for piece in rest)}
    for name in Parts.__struct_fields__:
        setattr(ledger, name, getattr(image.parts, name))
    for number in image.ready:
        ledger.ready.add(groups[number])
    ledger.unfiltered = list(ledger.ready) if ledger.rules.filtered else []
    ledger.deliveries = {step: [groups[number] for number in numbers] for step, numbers in image.deliveries.items()}
    ledger.evaluations = {step: [groups[number] for number in numbers] for step, numbers in image.evaluations.items()}
    for lease in image.leases:
        sample = groups[lease.group].samples[lease.index].find_fork(lease.fork_number)
        assert sample
        ledger.leases.hold(
            Lease(
                lease.id, sample, lease.worker, lease.step, lease.scoring, float("inf"),
                agent=lease.agent, turn_completed=lease.turn_completed,
            )
        )  # fmt: skip
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
    for evaluated in (group for groups in ledger.evaluations.values() for group in groups):
        for _, _, version in (segment for sample in evaluated.samples_with_forks for segment in sample.segments):
            ledger.evaluated_versions.setdefault(version.step, version)
    return image.attachment


def header_of(frozen: bytes | bytearray | memoryview) -> RunStarted | None:
    """The journal's first record, with the run's settings, from the bytes `frozen` that `freeze` has made of a ledger;
    None if the ledger had none yet."""
    return _decoder.decode(next(_pieces(memoryview(frozen)))).parts.header


def _group(frozen: memoryview, agents: bool) -> Group:
    values, samples = msgspec.msgpack.decode(frozen)
    group = Group(**dict(zip(GROUP_FIELDS, values, strict=True)))
    group.state, group.prompt = GroupState(group.state), group.prompt and tuple(group.prompt)
    group.images = tuple(group.images)
    thawed = _session if agents else _sample
    group.samples = [thawed(group, index, *values) for index, values in enumerate(samples)]
    return group


def _sample(group: Group, index: int, *values: Any) -> Sample:
    """Restore sample number `index` of a group, in a run without agents, from the values of `SAMPLE_FIELDS`."""
    sample = Sample(group, index, *values)
    sample.state = SampleState(sample.state)
    return sample


def _session(group: Group, index: int, *values: Any) -> AgentSample:
    """Restore the agent session of sample number `index` of a group from the values of `SESSION_FIELDS` and those of
    each of its forks."""
    *of_main, of_forks = values
    main, *forks = (
        AgentSample(group, index, **dict(zip(SESSION_FIELDS, each, strict=True))) for each in (of_main, *of_forks)
    )
    for sample in (main, *forks):
        sample.state = SampleState(sample.state)
        sample.images = tuple((name, start) for name, start in sample.images)
    for fork in forks:
        fork.main_sample = main
    main.forks = tuple(forks)
    return main


def live_positions(ledger: LedgerState) -> Iterator[int]:
    """Positions of the journal records with prompts, tokens and lines of metrics that the broker may still need."""
    for position, _ in (*ledger.prompts.submitted.values(), *ledger.recorded.values()):
        yield position
    for group in ledger.groups.values():
        yield group.prompt[0]
        for position, *_ in (group.token_scores or {}).values():
            yield position
        for sample in group.samples_with_forks:
            for ref in sample.chunk_refs:
                yield ref.record


def live_images(ledger: LedgerState) -> Iterator[str]:
    """Names of the images that the groups of the ledger, their sessions and the submitted prompts have."""
    yield from chain.from_iterable(ledger.prompts.images.values())
    for group in (*ledger.groups.values(), *chain.from_iterable(ledger.evaluations.values())):
        yield from group.images
        for sample in group.samples_with_forks if ledger.rules.agents else ():
            yield from (name for name, _ in sample.images)


class SnapshotStore:
    """The snapshots on disk, in the journal's folder, named by their positions."""

    def __init__(self, folder: Path):
        self.folder = folder

    def positions(self) -> list[int]:
        """Positions of the snapshots on disk, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}") if FILE_NAME.fullmatch(path.name))

    def newest_first(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (position, bytes of the serialized ledger) of each snapshot that can be read and is whole, the newest
        first. `position`: that of the first journal record that the ledger does not contain."""
        for position in reversed(self.positions()):
            try:
                data = memoryview(read_whole(self._path(position)))
            except OSError as error:
                log.warning("snapshot %s cannot be read (%s), and is passed over", self._path(position), error)
                continue
            frozen = data[HEAD.size :]
            if frozen and data[: HEAD.size] == HEAD.pack(FORMAT, crc32(frozen)):
                yield position, frozen
            else:
                log.warning("snapshot %s is damaged, or of another April, and passed over", self._path(position))

    def write(self, position: int, frozen: bytearray, previous: int | None = None) -> None:
        """Write `frozen`, the bytes that `freeze` has made of the ledger, as the snapshot at journal position
        `position`, and delete all earlier ones but one: the fallback in case the new snapshot is damaged.

        The fallback is the snapshot at `previous`, which was read back successfully, or, if that is None, the newest
        earlier one. Raises OSError, with the earlier snapshots unchanged.
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
