"""The state of the ledger, and how each journalled event changes it.

`apply` alone changes the state, so replaying the journal into an empty one rebuilds it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from april.broker.ledger import events
from april.broker.ledger.agent_sessions import AgentSessions
from april.broker.ledger.chunk_refs import add_chunk_ref
from april.broker.ledger.dead_letters import DeadLetterQueue
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import (
    TO_GENERATE,
    AgentSample,
    Group,
    GroupState,
    Lease,
    Sample,
    SampleState,
    needs_agent,
)
from april.wire.rows import CHUNK, FINISH_REASONS, ROW, padded
from april.wire.work import session_lease_id

START_BITS = 32
"""Number of low bits of a lease id: the id is (starts of the broker << 32) | counter, so that ids never repeat."""

NO_ATTEMPT = ("abort", "leave", "recall")
"""Causes of a lease's end that do not count as a failed attempt."""

DEAD_ROUNDS = 2
"""Number of rounds' worth of groups that may die in a row before the run fails."""


class LedgerState(AgentSessions):
    """The whole state of the ledger; events are applied here, commands are in `Ledger`."""

    def __init__(self, rules: Rules):
        super().__init__(rules)
        self.resumed: Counter[str] = Counter()
        """Tokens of partial responses that were leased again: `cached` to a worker with their KV cache, `moved` to
        another."""
        self.unfiltered: list[Group] = []
        """Complete groups that the filters have not judged yet; empty without filters."""
        self.evaluations: dict[int, list[Group]] = {}
        """Groups of the evaluations in progress, by evaluated policy step."""
        self.evaluated: dict[int, dict[str, Any]] = {}
        """Results of complete evaluations, by policy step."""
        self.dead_in_a_row = 0
        """Groups discarded for a dead sample since the last group became ready."""
        self.last_error = ""
        self.dead_letters = DeadLetterQueue()
        self.cursor: tuple[int, int] = (0, 0)
        """(epoch, row position) of the next prompt."""
        self.prompts_submitted = 0
        """Prompts that the trainer has submitted so far."""
        self.submitted: dict[int, Any] = {}
        """Journal references of the submitted prompts that are still needed, by row."""
        self.starts = 0
        """Number of starts of the broker in this run."""
        self.header: events.RunStarted | None = None
        self._next_group = 0
        self._next_ordinal = 0
        self.now = 0.0
        """Time of the newest TimePassed event, Unix seconds."""

    def apply(self, event: events.Event, reference: Any = None) -> None:
        """Change the state by one event; `reference` is the event's reference in the journal."""
        HANDLERS[type(event)](self, event, reference)

    def _on_run_started(self, event: events.RunStarted, reference: Any) -> None:
        self.header = event

    def _on_broker_started(self, event: events.BrokerStarted, reference: Any) -> None:
        self.starts, self.last_lease_id, self.dead_in_a_row = event.start, event.start << START_BITS, 0

    def _on_group_opened(self, event: events.GroupOpened, reference: Any) -> None:
        ordinal = -1
        if not event.evaluation:
            ordinal, self._next_ordinal = self._next_ordinal, self._next_ordinal + 1
            if event.replaces is None:
                self.cursor = (event.epoch, event.row + 1)
            else:
                self.dead_letters.drawn(event.replaces)
            self.counts[GroupState.OPEN] += 1
            self.bound.add(event.floor)
        group = Group(
            event.group, ordinal, event.evaluation, event.epoch, event.row, event.floor, reference, event.prompt_tokens,
            group_scored=event.group_scored,
        )  # fmt: skip
        kind, state = (AgentSample, SampleState.ACTING) if self.rules.agents else (Sample, SampleState.WAITING)
        group.samples = [kind(group, index, state) for index in range(event.size)]
        self.open_samples.add(group)
        if event.evaluation:
            self.evaluations.setdefault(event.floor, []).append(group)
        self.groups[group.id] = group
        self._next_group = group.id + 1
        for sample in group.samples if self.rules.agents else group.samples[:1]:
            self.push(sample)  # for its siblings see `_start`

    def _on_time_passed(self, event: events.TimePassed, reference: Any) -> None:
        self.now = event.at

    def _on_prompt_submitted(self, event: events.PromptSubmitted, reference: Any) -> None:
        self.submitted[event.row] = reference
        self.prompts_submitted = event.row + 1

    def push(self, sample: Sample) -> None:
        """Queue a sample for its next lease, in the queue that its state calls for."""
        if self.rules.agents and needs_agent(sample):
            self.queue.push_for_agent(sample)
        if sample.state not in (SampleState.ACTING, SampleState.LEASED):
            self.queue.push(sample)

    def _on_leased(self, event: events.Leased, reference: Any) -> None:
        group = self.groups[event.group]
        self.last_lease_id = event.lease_id
        leased = group.samples[event.index].find_fork(event.fork_number)
        assert leased
        lease = Lease(event.lease_id, leased, event.worker, event.step, event.scoring, float("inf"))
        begins_turn = self.rules.agents and lease.sample.sampled_until < lease.sample.length
        if lease.sample.state is SampleState.PARTIAL and not begins_turn:
            cached = lease.sample.cached_by(event.step) == event.worker
            self.resumed["cached" if cached else "moved"] += lease.sample.length
        for sample in lease.samples:
            sample.lease_id = event.lease_id
            self.open_samples.set_state(sample, SampleState.SCORING if event.scoring else SampleState.LEASED)
        self.hold(lease)
        if not group.started:
            self._start(group, event.step)

    def _start(self, group: Group, step: int) -> None:
        group.started = True
        if not group.evaluation:
            self.bound.remove(group.opened_at)
            self.bound.add(step)
        group.opened_at = step
        for sibling in group.samples_with_forks:
            if sibling.state in TO_GENERATE:
                self.queue.push(sibling)

    def _on_rows_accepted(self, event: events.RowsAccepted, reference: Any) -> None:
        record, length = reference or (0, event.payload_bytes)
        offset, trained, evaluated, leases = length - event.payload_bytes, 0, 0, self.leases
        for row in ROW.iter_unpack(event.table):
            lease_id, _, start, count, incarnation, step, size, checksum, kind, finish, _, over, parent = row
            lease = leases.get(lease_id) or leases[session_lease_id(lease_id)]
            sample = self._fork_of_row(lease, lease_id, start, parent) if lease.agent else lease.sample
            sample.length = start + count
            if kind == CHUNK:
                lease.floor, group = step, sample.group
                sample.last_step = step
                group.tokens += count
                if group.evaluation:
                    evaluated += count
                else:
                    trained += count
            else:
                sample.unsampled += count
                incarnation = step = 0
            sample.chunks = add_chunk_ref(sample.chunks, record, offset, size, checksum, count, kind, incarnation, step)
            offset += padded(size)
            if lease.agent:
                self.open_samples.set_state(sample, SampleState.PARTIAL)
                self.queue.push(sample)
            if finish:
                self._end_response(lease, FINISH_REASONS[finish], bool(over))
        self.tokens["evaluation"] += evaluated
        self.tokens["generated"] += trained
        self.tokens["open"] += trained

    def _end_response(self, lease: Lease, finish_reason: str, over: bool) -> None:
        """Finish a response or, with agents, a turn; `over`: the lease ends as well, and the sample waits for its
        score."""
        sample = lease.sample
        if self.rules.agents:
            return self._end_turn(lease)
        self.end_generation(lease)
        sample.finish_reason = finish_reason
        self.open_samples.set_state(sample, SampleState.GENERATED if over else SampleState.SCORING)
        self._raise_expected_lengths(sample)
        if over:
            self.release(lease.id)
            self.queue.push(sample)

    def _raise_expected_lengths(self, ended: Sample) -> None:
        """Queue shorter waiting siblings again, since their expected length, and so their order, depends on this
        response."""
        if ended.group.evaluation:
            return
        for sibling in ended.group.samples:
            if sibling.state in TO_GENERATE and sibling.length < ended.length:
                self.queue.push(sibling)

    def _on_sample_scored(self, event: events.SampleScored, reference: Any) -> None:
        lease = self.release(event.lease_id)
        sample = lease.sample
        if lease.agent:
            self._end_session(sample, event.superseded)
        self._set_score(sample, event.reward, event.details)
        self._complete_if_done(sample.group)

    def _set_score(self, sample: Sample, reward: float, details: dict[str, float]) -> None:
        sample.reward, sample.details = reward, details or None
        if isinstance(sample, AgentSample):
            sample.agent_state = b""
        self.open_samples.set_state(sample, SampleState.DONE)

    def _on_group_scored(self, event: events.GroupScored, reference: Any) -> None:
        lease = self.release(event.lease_id)
        for sample, reward, details in zip(lease.samples, event.rewards, event.details, strict=True):
            self._set_score(sample, reward, details)
        self._complete_if_done(lease.sample.group)

    def _on_lease_ended(self, event: events.LeaseEnded, reference: Any) -> None:
        lease = self.release(event.lease_id)
        samples, group = lease.samples, lease.sample.group
        starts_anew = lease.agent and event.cause == "agent_failed"
        if event.cause not in NO_ATTEMPT and (starts_anew or not lease.turn_completed):
            self.last_error = event.error or event.cause
            for session in (sample.session_sample for sample in samples):
                session.attempts, session.last_error = session.attempts + 1, self.last_error
        if starts_anew:
            self.revoke(lease.sample)
            for fork in lease.sample.with_forks:
                self._cut(fork, 0, event.cause)
            self._end_forks(lease.sample, SampleState.DEAD)
        for sample in samples:
            session = sample.session_sample
            if session.attempts >= self.rules.max_attempts:
                self.dead_letters.add(session, event.at)
                if self._kill_sample(session, "dead_sample"):
                    return
            elif sample.state is SampleState.SCORING:
                self.open_samples.set_state(sample, SampleState.GENERATED)
            elif starts_anew:
                self.open_samples.set_state(sample, SampleState.ACTING)
            elif not lease.agent:
                self.open_samples.set_state(sample, SampleState.PARTIAL if sample.length else SampleState.WAITING)
            sample.attempts = session.attempts
            if not lease.agent:
                sample.cache_worker = lease.worker if event.cause in NO_ATTEMPT else ""
        self._requeue_samples(group, samples)

    def _requeue_samples(self, group: Group, samples: list[Sample]) -> None:
        """Queue changed samples for their next lease; a group that is scored as a whole is queued as one sample."""
        self._complete_if_done(group)
        representative = group.live_samples[:1] if group.group_scored and group.awaits_scores else None
        for sample in representative or samples:
            if sample.state is not SampleState.DEAD:
                self.push(sample)

    def _on_session_lost(self, event: events.SessionLost, reference: Any) -> None:
        group = self.groups[event.group]
        if not self._kill_sample(group.samples[event.index], "not_replayed"):
            self._requeue_samples(group, [])

    def _kill_sample(self, session: Sample, reason: str) -> bool:
        """Mark a sample as dead; returns whether that ends its group, which is then discarded for `reason`."""
        self.revoke(session)
        self.open_samples.set_state(session, SampleState.DEAD)
        self._end_forks(session, SampleState.DEAD)
        group = session.group
        if len(group.live_samples) >= self._min_live_samples(group):
            return False
        self._end_group(group, reason)
        return True

    def _min_live_samples(self, group: Group) -> int:
        return 1 if group.evaluation else self.rules.min_group_size or len(group.samples)

    def _complete_if_done(self, group: Group) -> None:
        """Make a group ready for a batch if none of its samples is pending; the tokens of its dead samples are
        discarded."""
        if group.pending_samples:
            return
        self.open_samples.remove(group)
        if group.evaluation:
            group.state = GroupState.READY
            del self.groups[group.id]
            return
        dead = [sample for sample in group.samples if sample.state is SampleState.DEAD]
        lost = sum(sample.sampled_tokens for sample in dead)
        group.tokens -= lost
        self.tokens[group.state] -= lost
        if lost:
            self.discarded["dead_sample"] += lost
        if dead:
            self.on_discard([fork for sample in dead for fork in sample.with_forks], "dead_sample", 0)
        self.move(group, GroupState.READY)
        self.ready.add(group)
        if self.rules.filtered:
            self.unfiltered.append(group)
        self.dead_in_a_row = 0

    def _on_group_discarded(self, event: events.GroupDiscarded, reference: Any) -> None:
        self._end_group(self.groups[event.group], event.reason)

    def _end_group(self, group: Group, reason: str) -> None:
        for sample in group.samples:
            self.revoke(sample)
        if group.state is GroupState.OPEN:
            self.open_samples.remove(group)
        del self.groups[group.id]
        if group.evaluation:
            group.state = GroupState.DISCARDED
            return
        if reason == "dead_sample":
            self.dead_in_a_row += 1
            self.dead_letters.discard(group.id)
        else:
            self.submitted.pop(group.row, None)
        if group in self.ready:
            self.ready.remove(group)
        if group.state is GroupState.DELIVERED:
            self.deliveries[group.step].remove(group)
        else:
            self.bound.remove(group.opened_at)
        self.move(group, GroupState.DISCARDED)
        self.count_discarded(group, reason, 1)
        self.cohorts.finish(group.ordinal, [sample.sampled_tokens for sample in group.samples], [])
        self.on_discard(list(group.samples_with_forks), reason, 0)
        group.forget()

    def _on_group_requeued(self, event: events.GroupRequeued, reference: Any) -> None:
        self.dead_letters.requeue(event.group)

    def _on_evaluation_recorded(self, event: events.EvaluationRecorded, reference: Any) -> None:
        for group in self.evaluations.pop(event.step):
            group.forget()
        self.evaluated[event.step] = event.result

    def _on_checkpoint_durable(self, event: events.CheckpointDurable, reference: Any) -> None:
        for step in [step for step in self.deliveries if step < event.oldest]:
            for group in self.deliveries.pop(step):
                del self.groups[group.id]
                self.submitted.pop(group.row, None)
                group.forget()
        self.durable = event.step


HANDLERS: dict[type[events.Event], Callable[[LedgerState, Any, Any], None]] = {
    events.RunStarted: LedgerState._on_run_started,
    events.BrokerStarted: LedgerState._on_broker_started,
    events.GroupOpened: LedgerState._on_group_opened,
    events.PromptSubmitted: LedgerState._on_prompt_submitted,
    events.Leased: LedgerState._on_leased,
    events.AgentLeased: LedgerState._on_agent_leased,
    events.AgentClosed: LedgerState._on_agent_closed,
    events.RowsAccepted: LedgerState._on_rows_accepted,
    events.SessionLost: LedgerState._on_session_lost,
    events.SampleScored: LedgerState._on_sample_scored,
    events.GroupScored: LedgerState._on_group_scored,
    events.LeaseEnded: LedgerState._on_lease_ended,
    events.GroupDiscarded: LedgerState._on_group_discarded,
    events.GroupRequeued: LedgerState._on_group_requeued,
    events.EvaluationRecorded: LedgerState._on_evaluation_recorded,
    events.DrainStarted: LedgerState._on_drain_started,
    events.DrainEnded: LedgerState._on_drain_ended,
    events.RoundStarted: LedgerState._on_round_started,
    events.RoundEnded: LedgerState._on_round_ended,
    events.BatchDelivered: LedgerState._on_batch_delivered,
    events.BatchConsumed: LedgerState._on_batch_consumed,
    events.CheckpointDurable: LedgerState._on_checkpoint_durable,
    events.LearnerStarted: LedgerState._on_learner_started,
    events.TimePassed: LedgerState._on_time_passed,
}
"""Event type -> function that applies an event of this type, given the state, the event and its journal reference."""
