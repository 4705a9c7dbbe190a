"""The ledger's whole state at one position of the journal, so that a restart need not begin at the first record.

`freeze` and `thaw` turn a ledger into bytes and back: a `LedgerImage`, then each group and its samples, each behind its
length. A `SnapshotStore` keeps the two newest on disk. A snapshot is a shortcut, never the truth: the journal says
the same, and one that is damaged is passed over.
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

from april.broker.ledger.dead_letters import DeadLetters
from april.broker.ledger.events import RunStarted
from april.broker.ledger.samples import UNFINISHED, AgentSample, Group, GroupState, Lease, Sample, SampleState
from april.broker.ledger.state import LedgerState
from april.files.disk import sync

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
TEMPORARY = ".partial"
"""of one that is being written, behind the number of the process that writes it: what a process that was killed has
left, another never takes for its own"""
LENGTH = struct.Struct("<I")
HEAD = struct.Struct("<4sI")
"""of a file: its format, and the checksum of all that follows"""
FORMAT = b"APSC"

PLAIN = (
    "next_step", "consumed", "frontier", "durable", "branch", "dead_in_a_row", "last_error", "round", "round_open",
    "watermark", "cursor", "starts", "learner_uid", "weights_address", "weights_key", "_next_group", "_next_ordinal",
    "last_lease_id", "draining", "evaluated", "now", "prompts_submitted", "submitted",
)  # fmt: skip
"""attributes that are what they are"""
COUNTERS = ("tokens", "discarded", "counts", "resumed")


IN_GROUPS = [field.name for field in fields(Group) if field.name not in ("samples", "left")]
IN_LEASES = ("sample.group.id", "sample.index", "sample.branch", "id", "worker", "step", "scoring", "agent", "advanced")


class LedgerImage(msgspec.Struct, array_like=True):
    header: RunStarted | None
    plain: dict[str, Any]
    counters: dict[str, dict[str, int]]
    ready: list[int]
    deliveries: dict[int, list[int]]
    evaluations: dict[int, list[int]]
    leases: list[tuple[int, int, int, int, str, int, bool, bool, bool]]
    """`IN_LEASES`"""
    cohorts: tuple[int, dict[int, int], dict[int, int], dict[int, dict[int, tuple[list[int], list[int]]]]]
    dead_letters: DeadLetters
    beside: bytes
    """what others keep of it"""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LedgerImage)
_of_group, _of_lease = attrgetter(*IN_GROUPS), attrgetter(*IN_LEASES)


def freeze(ledger: LedgerState, beside: bytes = b"") -> bytearray:
    """The state as bytes.

    All of it is in one buffer: a large one comes from the system and goes back to it, while as many small pieces would
    fall between what lives on, and leave the process larger than the ledger needs.
    """
    complete = [group for groups in ledger.evaluations.values() for group in groups if group.id not in ledger.groups]
    image = bytearray()
    _append(image, _freeze_head(ledger, beside))
    for group in (*complete, *ledger.groups.values()):
        _append(image, (_of_group(group), [_of_sample(sample) for sample in group.samples]))
    return image


def _append(image: bytearray, piece: Any) -> None:
    place = len(image)
    image += LENGTH.pack(0)
    _encoder.encode_into(piece, image, -1)
    LENGTH.pack_into(image, place, len(image) - place - LENGTH.size)


def _pieces(image: memoryview) -> Iterator[memoryview]:
    place = 0
    while place < len(image):
        (length,) = LENGTH.unpack_from(image, place)
        start, place = place + LENGTH.size, place + LENGTH.size + length
        yield image[start:place]


def _freeze_head(ledger: LedgerState, beside: bytes) -> LedgerImage:
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
        beside,
    )


def _of_sample(sample: Sample) -> tuple[Any, ...]:
    """Its fields in their order, without its group and its place there; of a branch, what it shares instead of more."""
    beyond = sample.branch, sample.parent, sample.shared
    return (
        sample.state, sample.length, sample.chunks, sample.unsampled, sample.last_step, sample.lease_id,
        sample.attempts, sample.reward, sample.finish_reason, sample.last_error, sample.details, sample.home,
        sample.agent_lease, sample.left, beyond if sample.trunk else list(map(_of_sample, sample.branches)),
    )  # fmt: skip


def thaw(frozen: bytes | bytearray | memoryview, ledger: LedgerState) -> bytes:
    """Put an empty ledger into the state that was frozen; returns what was frozen beside it."""
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
    ledger.unjudged = list(ledger.ready) if ledger.rules.filtered else []
    ledger.deliveries = {step: [groups[number] for number in numbers] for step, numbers in image.deliveries.items()}
    ledger.evaluations = {step: [groups[number] for number in numbers] for step, numbers in image.evaluations.items()}
    for number, index, branch, lease_id, worker, step, scoring, agent, advanced in image.leases:
        sample = groups[number].samples[index].line(branch)
        assert sample
        ledger.hold(Lease(lease_id, sample, worker, step, scoring, float("inf"), agent=agent, advanced=advanced))
    for group in groups.values():
        if not group.evaluation or group.state is GroupState.OPEN:
            ledger.groups[group.id] = group
        if not group.evaluation and group.state in (GroupState.OPEN, GroupState.READY):
            ledger.bound.add(group.opened_at)
        if group.state is GroupState.OPEN:
            ledger.open_samples.add(group)
            for line in group.lines:
                if line.state in (*UNFINISHED, SampleState.GENERATED):
                    ledger.push(line)
    return image.beside


def header_of(frozen: bytes | bytearray | memoryview) -> RunStarted | None:
    """The run that a frozen ledger is of."""
    return _decoder.decode(next(_pieces(memoryview(frozen)))).header


def _group(frozen: memoryview, agents: bool) -> Group:
    values, samples = msgspec.msgpack.decode(frozen)
    group = Group(**dict(zip(IN_GROUPS, values, strict=True)))
    group.state, group.prompt = GroupState(group.state), group.prompt and tuple(group.prompt)
    thawed = _session if agents else _sample
    group.samples = [thawed(group, index, *values) for index, values in enumerate(samples)]
    return group


def _sample(group: Group, index: int, state: str, *rest: Any) -> Sample:
    """What `_of_sample` was of, without the three that only an agent's has."""
    *plain, _agent_lease, _left, _branches = rest
    return Sample(group, index, SampleState(state), *plain)


def _session(group: Group, index: int, state: str, *rest: Any, trunk: Sample | None = None) -> AgentSample:
    """The same of an agent's, with its branches."""
    *plain, beyond = rest
    sample = AgentSample(group, index, SampleState(state), *plain)
    sample.trunk = trunk
    if trunk:
        sample.branch, sample.parent, sample.shared = beyond
    else:
        sample.branches = tuple(_session(group, index, *values, trunk=sample) for values in beyond)
    return sample


def live_positions(ledger: LedgerState) -> Iterator[int]:
    """Where the journal holds prompts and tokens that may still be asked for."""
    for position, _ in ledger.submitted.values():
        yield position
    for group in ledger.groups.values():
        yield group.prompt[0]
        for line in group.lines:
            for place in line.places:
                yield place.record


class SnapshotStore:
    """Snapshots beside the journal's files, named by their positions."""

    def __init__(self, folder: Path):
        self.folder = folder

    def positions(self) -> list[int]:
        """Of the snapshots on disk, the oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}"))

    def newest_first(self) -> Iterator[tuple[int, memoryview]]:
        """(position, frozen ledger) of those that are whole."""
        for position in reversed(self.positions()):
            data = memoryview(self._path(position).read_bytes())
            frozen = data[HEAD.size :]
            if frozen and data[: HEAD.size] == HEAD.pack(FORMAT, crc32(frozen)):
                yield position, frozen
            else:
                log.warning("snapshot %s is damaged, or of another April, and passed over", self._path(position))

    def write(self, position: int, frozen: bytearray, before: int | None = None) -> None:
        """Put a frozen ledger on disk. Of those before it one stays, for a restart if this one is damaged: that at
        `before`, which was read back, or the newest. Raises OSError, and leaves all as it was."""
        for left in self.folder.glob(f"*{TEMPORARY}"):
            left.unlink(missing_ok=True)
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
            if other != (earlier[-1] if before is None else before):
                self._path(other).unlink()

    def _path(self, position: int) -> Path:
        return self.folder / f"{position:020d}{SUFFIX}"
