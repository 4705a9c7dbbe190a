"""History of training samples: where and when each was generated and scored. The learner gets it with the batch.

The ledger does not need the history. It is derived from the ledger's events, and stored in its snapshots, so that a
restarted broker delivers the same history as the one before it.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from april import wire
from april.broker.journal.snapshot import live_images
from april.broker.ledger import events
from april.broker.ledger.dead_letters import ERROR_CHARS
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Group, Lease, Sample, SampleState
from april.broker.telemetry.logged_groups import MOST_HELD_OUT, MOST_HELD_OUT_TOKENS, LoggedGroup, LoggedGroups
from april.data.groups import chosen_groups
from april.wire.rows import FINISH_REASONS, TABLE, read_rows
from april.wire.sockets.broker import name_of

GENERATE, SCORE, ACT = range(3)
KINDS = ("generate", "score", "act")
ENDS = (
    *FINISH_REASONS, "scored", "closed", "void", "abort", "leave", "lost", "expired", "generation_failed",
    "environment_failed", "scoring_failed", "agent_failed", "recall",
)  # fmt: skip
"""Ways in which a span ends: by the end of a response or turn (a finish reason), by a score, by its agent (closed),
with its group (void), or by a cause of `LeaseEnded`."""
SPAN = struct.Struct("<BBIddII")
"""Layout of a packed span, 30 bytes: index in `KINDS`; index in `ENDS` (0: not ended); index of the holder; begin and
end, Unix seconds; response length at begin and at end, tokens."""
MOST_HOLDERS = 1024
"""Number of remembered holders (workers, scorers, agents processes) above which those that no span refers to are
forgotten."""
UNREADABLE = "unreadable"
"""Discard reason of a group whose journal records cannot be read any more."""


@dataclass(slots=True)
class GroupHistory:
    """Times of a group in Unix seconds, and the spans of its samples."""

    opened_at: float
    spans: list[bytes]
    """Time spans in which a process held each sample, by the sample's index in the group: a series of `SPAN`s."""
    delivered_at: float = 0.0
    fork_spans: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Time spans in which a process held each fork, by (sample index, fork number): a series of `SPAN`s."""

    def spans_of(self, sample: Sample) -> bytes:
        if sample.main_sample is None:
            return self.spans[sample.index]
        return self.fork_spans.get((sample.index, sample.fork_number), b"")

    def set_spans(self, sample: Sample, spans: bytes) -> None:
        if sample.main_sample is None:
            self.spans[sample.index] = spans
        else:
            self.fork_spans[sample.index, sample.fork_number] = spans

    def end(self, sample: Sample, now: float, length: int, how: str, kinds: Sequence[int] = range(len(KINDS))) -> None:
        """End the newest span of each of `kinds` (indices in `KINDS`), if it has not ended. `length`: response length
        in tokens at its end; `how`: one of `ENDS`."""
        spans = self.spans_of(sample)
        for kind in kinds:
            at = next((at for at in range(len(spans) - SPAN.size, -1, -SPAN.size) if spans[at] == kind), None)
            if at is not None and not spans[at + 1]:
                _, _, holder, began, _, start, _ = SPAN.unpack_from(spans, at)
                ended = SPAN.pack(kind, ENDS.index(how), holder, began, now, start, length)
                spans = spans[:at] + ended + spans[at + SPAN.size :]
        self.set_spans(sample, spans)


class SampleHistory:
    """Histories of the ledger's groups. `record` takes every ledger event before it is applied."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.logged_groups = LoggedGroups()
        ledger.observer = self
        self._groups: dict[int, GroupHistory] = {}
        self._holders: list[str] = []
        """Uids of workers, scorers and agents processes; spans refer to them by index."""
        self._holder_indices: dict[str, int] = {}
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            events.GroupOpened: self._opened,
            events.Leased: self._leased,
            events.AgentLeased: self._agent_leased,
            events.RowsAccepted: self._rows_accepted,
            events.SampleScored: lambda event, now: self._ended(event.lease_id, "scored", now),
            events.GroupScored: lambda event, now: self._ended(event.lease_id, "scored", now),
            events.AgentClosed: lambda event, now: self._ended(event.lease_id, "closed", now),
            events.LeaseEnded: lambda event, now: self._ended(event.lease_id, event.cause, now),
            events.EvaluationRecorded: self._evaluated,
            events.BatchDelivered: self._delivered,
            events.CheckpointDurable: self._durable,
        }

    def record(self, event: events.Event) -> None:
        if handler := self._handlers.get(type(event)):
            handler(event, self.ledger.now)

    def freeze(self) -> bytes:
        """Encode all histories for a snapshot of the ledger."""
        groups = {
            group: (
                history.opened_at,
                history.delivered_at,
                history.spans,
                [(*fork, spans) for fork, spans in history.fork_spans.items()],
            )
            for group, history in self._groups.items()
        }
        return msgspec.msgpack.encode((groups, self._holders, *self.logged_groups.freeze()))

    def thaw(self, frozen: bytes) -> None:
        """Restore the state that `freeze` returned; empty bytes restore nothing."""
        if not frozen:
            return
        groups, self._holders, *logged = msgspec.msgpack.decode(frozen)
        if logged:
            self.logged_groups.thaw(*logged)
        self._holder_indices = {holder: index for index, holder in enumerate(self._holders) if holder}
        for group, (opened_at, delivered_at, spans, packed_forks) in groups.items():
            fork_spans = {(index, fork): packed for index, fork, packed in packed_forks}
            self._groups[group] = GroupHistory(opened_at, spans, delivered_at, fork_spans)

    def of_group(self, group: Group) -> "GroupHistory":
        return self._groups.get(group.id) or empty_history(group)

    def spans(self, sample: Sample) -> Iterator[wire.SampleSpan]:
        """Time spans in which a process has held the sample so far, in the order in which they began."""
        packed = self.of_group(sample.group).spans_of(sample)
        for kind, how, holder, began, ended, start, end in SPAN.iter_unpack(packed):
            yield wire.SampleSpan(KINDS[kind], name_of(self._holders[holder]), began, ended, start, end, ENDS[how])

    def sample_head(self, sample: Sample, reward: float) -> wire.SampleHead:
        """Build the description of a sample or a fork that the learner gets with its tokens. `reward`: that of the
        sample."""
        session = sample.session_sample
        return wire.SampleHead(
            sample.index,
            sample.length,
            reward,
            session.finish_reason,
            sample.segments,
            session.details or {},
            list(self.spans(sample)),
            sample.fork_number,
            parent=sample.parent_fork,
            shared_tokens=sample.shared_tokens,
            shown_images=list(sample.images),
        )

    def _holder_index(self, holder: str) -> int:
        if holder not in self._holder_indices:
            if len(self._holder_indices) == len(self._holders):
                self._holders.append("")
            index = self._holders.index("")
            self._holders[index], self._holder_indices[holder] = holder, index
        return self._holder_indices[holder]

    # --- events ---------------------------------------------------------------------------------------------

    def _training_history(self, group: Group) -> GroupHistory | None:
        """The group's history, to which an event is added; None for an evaluation group, which has no history."""
        if group.evaluation:
            return None
        history = self._groups.get(group.id)
        if history is None:
            history = self._groups[group.id] = empty_history(group)
        return history

    def _opened(self, event: events.GroupOpened, now: float) -> None:
        if not event.evaluation:
            self._groups[event.group] = GroupHistory(now, [b""] * event.size)

    def _leased(self, event: events.Leased, now: float) -> None:
        group = self.ledger.groups[event.group]
        on_group = event.scoring and group.group_scored
        leased = group.samples[event.index].find_fork(event.fork_number)
        for sample in group.live_samples if on_group or not leased else [leased]:
            self._begin(sample, SCORE if event.scoring else GENERATE, event.worker, now, sample.length)

    def _agent_leased(self, event: events.AgentLeased, now: float) -> None:
        sample = self.ledger.groups[event.group].samples[event.index]
        self._begin(sample, ACT, event.holder, now, sample.length)

    def _rows_accepted(self, event: events.RowsAccepted, now: float) -> None:
        table = np.frombuffer(event.table, TABLE)
        for row in read_rows(table[table["finish"] > 0].tobytes()):
            lease, length = self.ledger.leases[row.lease_id], row.end
            self._end(lease.sample, GENERATE, now, length, row.finish_reason)
            if not (row.ends_lease or self.ledger.rules.agents):
                self._begin(lease.sample, SCORE, lease.worker, now, length)

    def _ended(self, lease_id: int, how: str, now: float) -> None:
        lease = self.ledger.leases[lease_id]
        for sample in lease.samples:
            self._end(sample, kind_of_span(lease, sample), now, sample.length, how)

    def _delivered(self, event: events.BatchDelivered, now: float) -> None:
        for group in event.groups:
            if history := self._training_history(self.ledger.groups[group]):
                history.delivered_at = now
        self.logged_groups.deliver(event.step)

    def _durable(self, event: events.CheckpointDurable, now: float) -> None:
        for group in self._groups.keys() - self.ledger.groups.keys():
            del self._groups[group]
        self.logged_groups.forget(event.oldest)
        if len(self._holder_indices) > MOST_HOLDERS:
            self._forget_holders()

    def _forget_holders(self) -> None:
        """Free the indices of holders that no span names any more; later holders get them."""
        packed = [
            spans
            for history in self._groups.values()
            for spans in (*history.spans, *(spans for spans in history.fork_spans.values()))
        ]
        named = {holder for spans in packed for _, _, holder, *_ in SPAN.iter_unpack(spans)}
        self._holders = [holder if index in named else "" for index, holder in enumerate(self._holders)]
        self._holder_indices = {holder: index for index, holder in enumerate(self._holders) if holder}

    def _evaluated(self, event: events.EvaluationRecorded, now: float) -> None:
        """Keep some held-out groups of each evaluation set for the sample logs, if the run writes such logs
        (`Rules.keeps_discards`)."""
        by_set: dict[int, list[Group]] = {}
        for group in self.ledger.evaluations[event.step] if self.ledger.rules.keeps_discards else ():
            by_set.setdefault(group.epoch, []).append(group)
        for number, groups in by_set.items():
            rewards = [[sample.reward for sample in group.samples if sample.reward is not None] for group in groups]
            room = MOST_HELD_OUT_TOKENS
            for index in chosen_groups(rewards, MOST_HELD_OUT, f"{number} {event.step}"):
                sampled = [sample for sample in groups[index].samples_with_forks if sample.own_sampled_tokens]
                room -= sum(sample.length for sample in sampled)
                if room >= 0:
                    self._log_group(groups[index], sampled, now)

    def _log_group(self, group: Group, samples: Sequence[Sample], now: float, reason: str = "", kept: int = 0) -> None:
        heads = [self._untrained_head(sample, kept) for sample in samples]
        head = wire.GroupHead(
            group.id, group.prompt_tokens, heads, self.of_group(group).opened_at, now, discarded=reason,
            images=list(group.images),
        )  # fmt: skip
        drawn = group.evaluation, group.epoch, group.row
        self.logged_groups.add(LoggedGroup(head, group.prompt, [sample.chunks for sample in samples], drawn))

    def live_images(self) -> Iterator[str]:
        """Names of the images that the broker may still be asked for."""
        return chain(live_images(self.ledger), self.logged_groups.images())

    def record_discard(self, samples: Sequence[Sample], reason: str, kept: int) -> None:
        """Keep discarded samples for the sample logs, if the run writes such logs (`Rules.keeps_discards`): their
        tokens from offset `kept` on are the discarded ones. Drop the history of a group that has ended."""
        group, now = samples[0].group, self.ledger.now
        logged = [sample for sample in samples if sample.own_sampled_tokens or group.prompt_tokens]
        if self.ledger.rules.keeps_discards and logged and reason != UNREADABLE and self.logged_groups.has_room(reason):
            history = self.of_group(group)
            for sample in logged:
                history.end(sample, now, sample.length, "void")
            self._log_group(group, logged, now, reason, kept)
        if group.id not in self.ledger.groups:
            self._groups.pop(group.id, None)

    def _untrained_head(self, sample: Sample, kept: int) -> wire.SampleHead:
        session = sample.session_sample
        return replace(
            self.sample_head(sample, math.nan if session.reward is None else session.reward),
            attempts=session.attempts,
            error=session.last_error[:ERROR_CHARS],
            discarded_from=kept,
        )

    def _begin(self, sample: Sample, kind: int, holder: str, now: float, length: int) -> None:
        """Begin, at Unix time `now`, a span in which the process `holder` (its uid) has the sample. `kind`: index in
        `KINDS`; a span of this kind that has not ended is ended as void. `length`: tokens of the response now."""
        if history := self._training_history(sample.group):
            history.end(sample, now, length, "void", [kind])
            span = SPAN.pack(kind, 0, self._holder_index(holder), now, now, length, length)
            history.set_spans(sample, history.spans_of(sample) + span)

    def _end(self, sample: Sample, kind: int, now: float, length: int, how: str) -> None:
        """End, at Unix time `now`, the sample's newest span of this `kind` (index in `KINDS`), if it has not ended.
        `length`: tokens of the response at its end; `how`: one of `ENDS`."""
        if history := self._training_history(sample.group):
            history.end(sample, now, length, how, [kind])


def empty_history(group: Group) -> GroupHistory:
    return GroupHistory(0.0, [b""] * len(group.samples))


def kind_of_span(lease: Lease, sample: Sample) -> int:
    """Index in `KINDS` of the kind of span under which the history records a lease on a sample."""
    if lease.agent:
        return ACT
    return SCORE if sample.state is SampleState.SCORING else GENERATE
