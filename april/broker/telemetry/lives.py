"""What happened to each training sample, where and when, to be read with it: told to the learner with its batch.

The ledger does not need it and does not keep it: it is found by watching what the ledger writes down, and written into
its snapshots. So a broker that was restarted tells a batch's lives as the one before it did.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from april import wire
from april.broker.ledger import events
from april.broker.ledger.dead_letters import ERROR_CHARS
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Group, Lease, Sample, SampleState
from april.broker.telemetry.discards import Discard, Discards
from april.connections.identity import name_of
from april.wire.rows import ENDINGS, TABLE, read_rows

GENERATE, SCORE, ACT = range(3)
WHAT = ("generate", "score", "act")
HOW = (
    *ENDINGS, "scored", "closed", "void", "abort", "leave", "lost", "expired", "generation_failed",
    "environment_failed", "scoring_failed", "agent_failed", "recall",
)  # fmt: skip
"""how a stay ended: with a response or turn, with a score, by its agent, with its group; else as LeaseEnded says"""
STAY = struct.Struct("<BBIddII")
"""a stay's kind, how it ended (0: it has not), holder, began, ended, start, end; 30 bytes"""
UNREADABLE = "unreadable"
"""why a group is discarded of which the journal has lost something"""


@dataclass(slots=True)
class GroupLife:
    opened_at: float
    stays: list[bytes]
    """of each sample, one stay behind the other"""
    delivered_at: float = 0.0
    of_branches: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """by index and branch"""

    def of(self, sample: Sample) -> bytes:
        if sample.trunk is None:
            return self.stays[sample.index]
        return self.of_branches.get((sample.index, sample.branch), b"")

    def tell(self, sample: Sample, stays: bytes) -> None:
        if sample.trunk is None:
            self.stays[sample.index] = stays
        else:
            self.of_branches[sample.index, sample.branch] = stays

    def end(self, sample: Sample, now: float, length: int, how: str, kinds: Sequence[int] = range(len(WHAT))) -> None:
        """The newest stay of each of these kinds, unless it has ended."""
        stays = self.of(sample)
        for kind in kinds:
            at = next((at for at in range(len(stays) - STAY.size, -1, -STAY.size) if stays[at] == kind), None)
            if at is not None and not stays[at + 1]:
                _, _, holder, began, _, start, _ = STAY.unpack_from(stays, at)
                ended = STAY.pack(kind, HOW.index(how), holder, began, now, start, length)
                stays = stays[:at] + ended + stays[at + STAY.size :]
        self.tell(sample, stays)


class Lives:
    """Those of the groups that the ledger has; `see` is shown every event before it is applied."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.discards = Discards()
        ledger.on_discard = self._discarded
        self._lives: dict[int, GroupLife] = {}
        """by group"""
        self._holders: list[str] = []
        self._numbers: dict[str, int] = {}
        """of workers, scorers and agents processes: places in the list"""
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            events.GroupOpened: self._opened,
            events.Leased: self._leased,
            events.AgentLeased: self._agent_leased,
            events.RowsAccepted: self._rows_accepted,
            events.SampleScored: lambda event, now: self._ended(event.lease_id, "scored", now),
            events.GroupScored: lambda event, now: self._ended(event.lease_id, "scored", now),
            events.AgentClosed: lambda event, now: self._ended(event.lease_id, "closed", now),
            events.LeaseEnded: lambda event, now: self._ended(event.lease_id, event.cause, now),
            events.BatchDelivered: self._delivered,
            events.CheckpointDurable: self._durable,
        }

    def see(self, event: events.Event) -> None:
        if handler := self._handlers.get(type(event)):
            handler(event, self.ledger.now)

    def freeze(self) -> bytes:
        lives = {
            group: (
                life.opened_at,
                life.delivered_at,
                life.stays,
                [(*branch, stays) for branch, stays in life.of_branches.items()],
            )
            for group, life in self._lives.items()
        }
        return msgspec.msgpack.encode((lives, self._holders, *self.discards.freeze()))

    def thaw(self, frozen: bytes) -> None:
        """What `freeze` was of; nothing of nothing."""
        if not frozen:
            return
        lives, self._holders, *discards = msgspec.msgpack.decode(frozen)
        if discards:
            self.discards.thaw(*discards)
        self._numbers = {holder: number for number, holder in enumerate(self._holders)}
        for group, (opened_at, delivered_at, stays, of_branches) in lives.items():
            branches = {(index, branch): told for index, branch, told in of_branches}
            self._lives[group] = GroupLife(opened_at, stays, delivered_at, branches)

    def of(self, group: Group) -> "GroupLife":
        return self._lives.get(group.id) or no_life(group)

    def stays(self, sample: Sample) -> Iterator[wire.Stay]:
        """Where it has been up to now."""
        for what, how, holder, began, ended, start, end in STAY.iter_unpack(self.of(sample.group).of(sample)):
            yield wire.Stay(WHAT[what], name_of(self._holders[holder]), began, ended, start, end, HOW[how])

    def head_of(self, line: Sample, reward: float) -> wire.SampleHead:
        """What is told of it with its batch, or beside that."""
        session = line.session
        return wire.SampleHead(
            line.index,
            line.length,
            reward,
            session.finish_reason,
            line.segments,
            session.details or {},
            list(self.stays(line)),
            line.branch,
            parent=line.parent,
            shared=line.shared,
        )

    def _number(self, holder: str) -> int:
        if holder not in self._numbers:
            self._numbers[holder] = len(self._holders)
            self._holders.append(holder)
        return self._numbers[holder]

    # --- events ---------------------------------------------------------------------------------------------

    def _life(self, group: Group) -> GroupLife | None:
        """None of evaluation."""
        if group.evaluation:
            return None
        life = self._lives.get(group.id)
        if life is None:
            life = self._lives[group.id] = no_life(group)
        return life

    def _opened(self, event: events.GroupOpened, now: float) -> None:
        if not event.evaluation:
            self._lives[event.group] = GroupLife(now, [b""] * event.size)

    def _leased(self, event: events.Leased, now: float) -> None:
        group = self.ledger.groups[event.group]
        together = event.scoring and group.together
        leased = group.samples[event.index].line(event.branch)
        for sample in group.live_samples if together or not leased else [leased]:
            self._begin(sample, SCORE if event.scoring else GENERATE, event.worker, now, sample.length)

    def _agent_leased(self, event: events.AgentLeased, now: float) -> None:
        sample = self.ledger.groups[event.group].samples[event.index]
        self._begin(sample, ACT, event.holder, now, sample.length)

    def _rows_accepted(self, event: events.RowsAccepted, now: float) -> None:
        table = np.frombuffer(event.table, TABLE)
        for row in read_rows(table[table["finish"] > 0].tobytes()):
            lease, length = self.ledger.leases[row.lease_id], row.end
            self._end(lease.sample, GENERATE, now, length, row.finish_reason)
            if not (row.over or self.ledger.rules.agents):
                self._begin(lease.sample, SCORE, lease.worker, now, length)

    def _ended(self, lease_id: int, how: str, now: float) -> None:
        lease = self.ledger.leases[lease_id]
        for sample in lease.samples:
            self._end(sample, what_under(lease, sample), now, sample.length, how)

    def _delivered(self, event: events.BatchDelivered, now: float) -> None:
        for group in event.groups:
            if life := self._life(self.ledger.groups[group]):
                life.delivered_at = now
        self.discards.deliver(event.step)

    def _durable(self, event: events.CheckpointDurable, now: float) -> None:
        for group in self._lives.keys() - self.ledger.groups.keys():
            del self._lives[group]
        self.discards.forget(event.oldest)

    def _discarded(self, lines: Sequence[Sample], reason: str, kept: int) -> None:
        """Keep what is told of them, where that is wanted; the life of a group that has ended is forgotten."""
        group, now = lines[0].group, self.ledger.now
        told = [line for line in lines if line.own or group.prompt_tokens]
        if self.ledger.rules.keeps_discards and told and reason != UNREADABLE and self.discards.has_room(reason):
            life = self.of(group)
            for line in told:
                life.end(line, now, line.length, "void")
            heads = [
                replace(
                    self.head_of(line, math.nan if line.session.reward is None else line.session.reward),
                    attempts=line.session.attempts,
                    error=line.session.last_error[:ERROR_CHARS],
                    discarded_from=kept,
                )
                for line in told
            ]
            head = wire.GroupHead(group.id, group.prompt_tokens, heads, life.opened_at, now, discarded=reason)
            self.discards.add(Discard(head, group.prompt, [line.chunks for line in told]))
        if group.id not in self.ledger.groups:
            self._lives.pop(group.id, None)

    def _begin(self, sample: Sample, what: int, holder: str, now: float, length: int) -> None:
        if life := self._life(sample.group):
            life.end(sample, now, length, "void", [what])
            life.tell(sample, life.of(sample) + STAY.pack(what, 0, self._number(holder), now, now, length, length))

    def _end(self, sample: Sample, what: int, now: float, length: int, how: str) -> None:
        """The newest stay of that kind, if it has not ended."""
        if life := self._life(sample.group):
            life.end(sample, now, length, how, [what])


def no_life(group: Group) -> GroupLife:
    return GroupLife(0.0, [b""] * len(group.samples))


def what_under(lease: Lease, sample: Sample) -> int:
    """What is done to a sample under a lease."""
    if lease.agent:
        return ACT
    return SCORE if sample.state is SampleState.SCORING else GENERATE
