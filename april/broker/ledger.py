"""Who owns each sample, what is finished, what was trained: a state machine without I/O, clocks or sockets.

    sample: waiting -> leased -> (partial -> leased ...) -> generated -> scoring -> done | dead
    group:  open -> ready -> delivered(step) -> trained(step) | discarded(reason)

Every change is an event: a command checks itself, hands the event to `record` (the journal) and applies it, and
`apply` alone changes the state, so replaying the journal into an empty ledger rebuilds it. The ledger closes:
generated = trained + delivered + ready + open + sum(discarded), in acknowledged tokens, at any moment.

    ledger = Ledger(Rules(batch_groups=32, group_size=8, max_staleness=5), record=journal.append)
    group = ledger.open_group(epoch=0, row=17, floor=0)
    lease = ledger.lease(group.samples[0], worker="w0", step=0, expires_at=now + 60)
    ledger.add_chunk(lease.token, start=0, count=40, version=Version(0, 0), ids=..., logprobs=...)
    ledger.add_chunk(lease.token, start=40, count=9, version=Version(0, 1), finish_reason="stop", ...)
    ledger.score(lease.token, reward=1.0)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from april.broker import events
from april.broker.bound import StalenessBound
from april.broker.lengths import LengthCohorts
from april.broker.samples import TO_GENERATE, Group, GroupState, HandOutQueue, Lease, Sample, SampleState
from april.version import Version

EPOCH_BITS = 32
"""a lease token is (broker epoch << 32) | counter, so that it never repeats"""

NO_ATTEMPT = ("abort", "leave")
"""causes of a lease's end that are nobody's failure"""


class Verdict(StrEnum):
    OK = "ok"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FENCED = "fenced"
    """the lease is not current: an older holder"""
    INVALID = "invalid"


class LedgerError(RuntimeError):
    """A request that contradicts the ledger; the text says how."""


@dataclass(frozen=True)
class Rules:
    """What stays the same over a run."""

    batch_groups: int
    """N"""
    group_size: int
    """n"""
    max_staleness: int
    """S, policy steps"""
    max_attempts: int = 5
    min_group_size: int | None = None
    max_response_tokens: int = 1 << 30


class Ledger:
    def __init__(self, rules: Rules, record: Callable[[events.Event], Any] = lambda event: None):
        self.rules = rules
        self.record = record
        self.groups: dict[int, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.load: Counter[tuple[str, bool]] = Counter()
        """leases that generate, by (worker, evaluation)"""
        self.queue = HandOutQueue()
        self.bound = StalenessBound(rules.max_staleness, rules.batch_groups)
        self.cohorts = LengthCohorts(rules.batch_groups)
        self.tokens: Counter[str] = Counter()
        """acknowledged tokens: generated, trained, delivered, ready, open, evaluation"""
        self.discarded: Counter[str] = Counter()
        """acknowledged tokens of discarded groups by reason"""
        self.counts: Counter[str] = Counter()
        """training groups by state"""
        self.deliveries: dict[int, list[Group]] = {}
        self.ready: list[Group] = []
        """complete groups that wait for a batch, in order of completion"""
        self.evaluations: dict[int, list[Group]] = {}
        """evaluation groups by the policy step they were opened for"""
        self.next_step = 0
        """the next batch to deliver"""
        self.consumed = 0
        """batches in the learner's weights"""
        self.frontier = 0
        """most batches any learner of this run has consumed"""
        self.durable = 0
        """batches in the newest checkpoint on disk"""
        self.branch = -1
        self.dead_in_a_row = 0
        """groups that lost a sample for good since the last one that became ready"""
        self.last_error = ""
        self.voided: list[tuple[str, int]] = []
        """(worker, token) of leases that ended with their group, until somebody tells the workers"""
        self.round = -1
        self.round_open = False
        self.watermark = 0
        self.cursor: tuple[int, int] = (0, 0)
        """(epoch, row position) of the next prompt"""
        self.epoch = 0
        self.header: events.RunStarted | None = None
        self._next_group = 0
        self._next_ordinal = 0
        self._grants = 0

    # --- commands -------------------------------------------------------------------------------------------

    def commit(self, event: events.Event) -> None:
        self.apply(event, self.record(event))

    def open_group(
        self, epoch: int, row: int, floor: int, evaluation: bool = False, size: int | None = None, prompt: bytes = b""
    ) -> Group:
        """Draw a prompt. `floor`: workers must be at this step or later to start it.

        Evaluation groups take no part in bound and batches; their `epoch` is the policy step they belong to.
        """
        if not evaluation and not self.bound.survives(self.next_step, floor):
            raise LedgerError(f"opening a group at step {floor} would break the staleness bound")
        group = self._next_group
        self.commit(events.GroupOpened(group, evaluation, epoch, row, size or self.rules.group_size, floor, prompt))
        return self.groups[group]

    def lease(self, sample: Sample, worker: str, step: int, expires_at: float) -> Lease:
        """Give a sample that waits to a worker at policy step `step`."""
        scoring = sample.state is SampleState.GENERATED
        if sample.token or not (scoring or sample.state in TO_GENERATE) or sample.group.state is not GroupState.OPEN:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} is not waiting")
        if not scoring and step < sample.first_step:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} needs step {sample.first_step}, not {step}")
        token = (self.epoch << EPOCH_BITS) | (self._grants + 1)
        self.commit(events.Leased(token, sample.group.id, sample.index, worker, step, scoring))
        self.leases[token].expires_at = expires_at
        return self.leases[token]

    def add_chunk(
        self,
        token: int,
        start: int,
        count: int,
        version: Version,
        finish_reason: str = "",
        ids: bytes = b"",
        logprobs: bytes = b"",
    ) -> Verdict:
        """Accept tokens iff the lease is current and they start at the acknowledged length.

        A finish reason ends the response together with its last tokens; the holder scores it next.
        """
        lease = self.leases.get(token)
        if lease is None:
            return Verdict.FENCED
        sample = lease.sample
        if start < sample.length:
            return Verdict.DUPLICATE
        if start > sample.length:
            return Verdict.GAP
        if version.step < max(lease.step, sample.first_step):
            return Verdict.FENCED
        left = self.rules.max_response_tokens - sample.length - count
        within_budget = count > 0 and (left > 0 or (left == 0 and finish_reason))
        if not lease.generating or not within_budget or version.step > self.frontier:
            return Verdict.INVALID
        self.commit(events.ChunkAccepted(token, start, count, version, finish_reason, ids, logprobs))
        return Verdict.OK

    def score(self, token: int, reward: float) -> Verdict:
        lease = self.leases.get(token)
        if lease is None:
            return Verdict.FENCED
        if lease.generating:
            return Verdict.GAP
        self.commit(events.SampleScored(token, reward))
        return Verdict.OK

    def end_lease(self, token: int, cause: str, error: str = "") -> Verdict:
        """The sample goes back to where it waits; too many failures make it dead, and perhaps its group."""
        if token not in self.leases:
            return Verdict.FENCED
        self.commit(events.LeaseEnded(token, cause, error))
        return Verdict.OK

    def renew(self, tokens: list[int], expires_at: float) -> list[int]:
        """Prolong leases, but for aborted ones; returns the tokens that are not current any more."""
        for token in tokens:
            if token in self.leases and not self.is_aborted(token):
                self.leases[token].expires_at = expires_at
        return [token for token in tokens if token not in self.leases]

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over."""
        expired = [lease for lease in self.leases.values() if lease.expires_at <= now]
        for lease in expired:
            cause = "abort" if self.is_aborted(lease.token) else "expired"
            self.end_lease(lease.token, cause, "" if cause == "abort" else "the lease was not renewed")
        return expired

    def discard(self, group: Group, reason: str) -> None:
        """End an open group for a reason that is counted; its leases are void."""
        self.commit(events.GroupDiscarded(group.id, reason))

    def start_round(self) -> None:
        self.commit(events.RoundStarted(self.round + 1))

    def end_round(self) -> int:
        """Grants up to the returned watermark are to be handed back."""
        self.commit(events.RoundEnded(self.round, (self.epoch << EPOCH_BITS) | self._grants))
        return self.watermark

    def choose_batch(self, groups: int) -> list[Group] | None:
        """`groups` complete groups, those that are due first; None if there are too few or the bound forbids it."""
        if len(self.ready) < groups or not groups:
            return None
        chosen = sorted(self.ready, key=lambda group: group.opened_at)[:groups]
        if not self.bound.survives_delivery(self.next_step, [group.opened_at for group in chosen]):
            return None
        return sorted(chosen, key=lambda group: group.id)

    def deliver(self, groups: list[Group]) -> int:
        """Fix the next batch for good; returns its step."""
        step = self.next_step
        self.commit(events.BatchDelivered(step, [group.id for group in groups]))
        return step

    def consume(self, step: int) -> Verdict:
        """The learner's weights contain batch `step`."""
        if step < self.consumed:
            return Verdict.DUPLICATE
        if step != self.consumed or step not in self.deliveries:
            return Verdict.INVALID
        self.commit(events.BatchConsumed(step))
        return Verdict.OK

    def checkpoint(self, step: int) -> Verdict:
        """A checkpoint that contains all batches below `step` is on disk."""
        if not self.durable <= step <= self.consumed:
            return Verdict.DUPLICATE if step < self.durable else Verdict.INVALID
        self.commit(events.CheckpointDurable(step))
        return Verdict.OK

    def start_learner(self, step: int) -> None:
        """A learner goes on from checkpoint `step`: later groups are delivered again, under a new branch.

        A checkpoint may be ahead of the last report by the batches that were delivered; they are consumed, then.
        """
        if not self.first_kept_step <= step <= self.next_step:
            raise LedgerError(
                f"the learner starts from checkpoint {step}, but this run can go on from {self.first_kept_step} "
                f"to {self.next_step}; give it a checkpoint of this run"
            )
        while self.consumed < step:
            self.commit(events.BatchConsumed(self.consumed))
        self.commit(events.LearnerStarted(self.branch + 1, step))

    # --- questions ------------------------------------------------------------------------------------------

    @property
    def first_kept_step(self) -> int:
        return min(self.deliveries, default=self.consumed)

    def is_aborted(self, token: int) -> bool:
        """Whether the sample is to be handed back: generated for training under a grant of an ended round."""
        lease = self.leases.get(token)
        return bool(lease and token <= self.watermark and lease.generating and not lease.sample.group.evaluation)

    @property
    def undelivered(self) -> int:
        return self.counts[GroupState.OPEN] + self.counts[GroupState.READY]

    @property
    def generating(self) -> int:
        """Training samples that some worker generates now."""
        return sum(count for (_, evaluation), count in self.load.items() if not evaluation)

    @property
    def partials_waiting(self) -> int:
        return sum(s.state is SampleState.PARTIAL for group in self.open_groups() for s in group.samples)

    def open_groups(self) -> list[Group]:
        """Training groups that are not complete."""
        return [group for group in self.groups.values() if group.state is GroupState.OPEN and not group.evaluation]

    def account(self) -> dict[str, Any]:
        """The ledger in acknowledged tokens, as in summary.json."""
        names = ("generated", "trained", "delivered", "ready", "open")
        return {name: self.tokens[name] for name in names} | {
            "discarded": dict(self.discarded),
            "evaluation": self.tokens["evaluation"],
        }

    @property
    def closed(self) -> bool:
        """Whether the sum over the groups' ends equals what was generated."""
        parts = sum(self.tokens[name] for name in ("trained", "delivered", "ready", "open"))
        return self.tokens["generated"] == parts + sum(self.discarded.values())

    # --- events ---------------------------------------------------------------------------------------------

    def apply(self, event: events.Event, reference: Any = None) -> None:
        """Change the state by one recorded fact."""
        getattr(self, f"_on_{type(event).__name__}")(event, reference)

    def _on_RunStarted(self, event: events.RunStarted, reference: Any) -> None:
        self.header = event

    def _on_BrokerStarted(self, event: events.BrokerStarted, reference: Any) -> None:
        self.epoch, self._grants = event.epoch, 0

    def _on_GroupOpened(self, event: events.GroupOpened, reference: Any) -> None:
        ordinal = -1
        if not event.evaluation:
            ordinal, self._next_ordinal = self._next_ordinal, self._next_ordinal + 1
            self.cursor = (event.epoch, event.row + 1)
            self.counts[GroupState.OPEN] += 1
            self.bound.add(event.floor)
        prompt_tokens = len(event.prompt) // 4
        group = Group(
            event.group, ordinal, event.evaluation, event.epoch, event.row, event.floor, reference, prompt_tokens
        )
        group.samples = [Sample(group, index) for index in range(event.size)]
        if event.evaluation:
            self.evaluations.setdefault(event.epoch, []).append(group)
        self.groups[group.id] = group
        self._next_group = group.id + 1
        for sample in group.samples:
            self.queue.push(sample)

    def _on_Leased(self, event: events.Leased, reference: Any) -> None:
        group = self.groups[event.group]
        sample = group.samples[event.index]
        self._grants = event.token & ((1 << EPOCH_BITS) - 1)
        sample.token = event.token
        sample.state = SampleState.SCORING if event.scoring else SampleState.LEASED
        self.leases[event.token] = Lease(event.token, sample, event.worker, event.step, event.scoring, float("inf"))
        if not event.scoring:
            self.load[event.worker, group.evaluation] += 1
        if not group.started:
            self._start(group, event.step)

    def _stops_generating(self, lease: Lease) -> None:
        if lease.generating:
            self.load[lease.worker, lease.sample.group.evaluation] -= 1

    def _start(self, group: Group, step: int) -> None:
        group.started = True
        if not group.evaluation:
            self.bound.remove(group.opened_at)
            self.bound.add(step)
        group.opened_at = step
        for sibling in group.samples:
            if sibling.state is SampleState.WAITING and not group.evaluation:
                self.queue.push(sibling)

    def _on_ChunkAccepted(self, event: events.ChunkAccepted, reference: Any) -> None:
        sample = self.leases[event.token].sample
        end = event.start + event.count
        if sample.segments and sample.segments[-1][2] == event.version:
            sample.segments[-1] = (sample.segments[-1][0], end, event.version)
        else:
            sample.segments.append((event.start, end, event.version))
        sample.chunks.append(reference)
        sample.length = end
        sample.group.tokens += event.count
        if sample.group.evaluation:
            self.tokens["evaluation"] += event.count
        else:
            self.tokens["generated"] += event.count
            self.tokens["open"] += event.count
        if event.finish_reason:
            self._stops_generating(self.leases[event.token])
            sample.state, sample.finish_reason = SampleState.SCORING, event.finish_reason

    def _on_SampleScored(self, event: events.SampleScored, reference: Any) -> None:
        sample = self.leases.pop(event.token).sample
        sample.token, sample.state, sample.reward = 0, SampleState.DONE, event.reward
        self._complete(sample.group)

    def _on_LeaseEnded(self, event: events.LeaseEnded, reference: Any) -> None:
        lease = self.leases.pop(event.token)
        self._stops_generating(lease)
        sample = lease.sample
        sample.token = 0
        if event.cause not in NO_ATTEMPT:
            sample.attempts += 1
            sample.last_error = self.last_error = event.error or event.cause
        if sample.attempts >= self.rules.max_attempts:
            sample.state = SampleState.DEAD
            if len(sample.group.live_samples) < self._least_samples(sample.group):
                self._end_group(sample.group, "dead_sample")
            else:
                self._complete(sample.group)
            return
        if sample.state is SampleState.SCORING:
            sample.state = SampleState.GENERATED
        else:
            sample.state = SampleState.PARTIAL if sample.length else SampleState.WAITING
        self.queue.push(sample)

    def _least_samples(self, group: Group) -> int:
        return 1 if group.evaluation else self.rules.min_group_size or len(group.samples)

    def _complete(self, group: Group) -> None:
        """Make the group ready if none of its samples is on the way; what dead ones had is discarded."""
        if any(sample.state is not SampleState.DONE for sample in group.live_samples):
            return
        if group.evaluation:
            group.state = GroupState.READY
            del self.groups[group.id]
            return
        lost = sum(sample.length for sample in group.samples if sample.state is SampleState.DEAD)
        group.tokens -= lost
        self.tokens[group.state] -= lost
        if lost:
            self.discarded["dead_sample"] += lost
        self._move(group, GroupState.READY)
        self.ready.append(group)
        self.dead_in_a_row = 0

    def _move(self, group: Group, state: GroupState) -> None:
        """Change a training group's state and the tokens and counts that go with it."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        self.tokens[group.state] -= group.tokens
        if state is not GroupState.DISCARDED:
            self.tokens[state] += group.tokens
        group.state = state

    def _on_GroupDiscarded(self, event: events.GroupDiscarded, reference: Any) -> None:
        self._end_group(self.groups[event.group], event.reason)

    def _end_group(self, group: Group, reason: str) -> None:
        for sample in group.samples:
            if sample.token:
                lease = self.leases.pop(sample.token)
                self._stops_generating(lease)
                self.voided.append((lease.worker, lease.token))
                sample.token = 0
        del self.groups[group.id]
        if group.evaluation:
            group.state = GroupState.DISCARDED
            return
        self.dead_in_a_row += reason == "dead_sample"
        if group in self.ready:
            self.ready.remove(group)
        self._move(group, GroupState.DISCARDED)
        self.discarded[reason] += group.tokens
        self.counts[reason] += 1
        self.bound.remove(group.opened_at)
        self.cohorts.finish(group.ordinal, [sample.length for sample in group.samples], [])

    def _on_RoundStarted(self, event: events.RoundStarted, reference: Any) -> None:
        self.round, self.round_open = event.round, True

    def _on_RoundEnded(self, event: events.RoundEnded, reference: Any) -> None:
        self.round_open, self.watermark = False, event.watermark

    def _on_BatchDelivered(self, event: events.BatchDelivered, reference: Any) -> None:
        groups = [self.groups[group] for group in event.groups]
        for group in groups:
            self._move(group, GroupState.DELIVERED)
            self.bound.remove(group.opened_at)
            self.ready.remove(group)
            group.step = event.step
        self.deliveries[event.step] = groups
        self.next_step = event.step + 1

    def _on_BatchConsumed(self, event: events.BatchConsumed, reference: Any) -> None:
        for group in self.deliveries[event.step]:
            self._move(group, GroupState.TRAINED)
            created = [sample.length for sample in group.samples]
            self.cohorts.finish(group.ordinal, created, [sample.length for sample in group.live_samples])
        self.consumed = event.step + 1
        self.frontier = max(self.frontier, self.consumed)

    def _on_CheckpointDurable(self, event: events.CheckpointDurable, reference: Any) -> None:
        for step in [step for step in self.deliveries if step < min(self.durable, event.step)]:
            for group in self.deliveries.pop(step):
                del self.groups[group.id]
        self.durable = event.step

    def _on_LearnerStarted(self, event: events.LearnerStarted, reference: Any) -> None:
        for step in range(event.step, self.consumed):
            for group in self.deliveries[step]:
                self._move(group, GroupState.DELIVERED)
        self.consumed, self.branch = event.step, event.branch
