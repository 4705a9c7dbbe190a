"""How each journalled event changes the state of the ledger.

Replaying the journal's events into an empty state rebuilds it: nothing else changes the state.
"""

from collections.abc import Callable
from typing import Any

from april.broker.ledger import events
from april.broker.ledger.chunk_refs import add_chunk_ref
from april.broker.ledger.forks import add_fork
from april.broker.ledger.samples import (
    TO_GENERATE,
    AgentSample,
    Group,
    GroupState,
    Lease,
    Sample,
    SampleState,
    as_agent_sample,
)
from april.broker.ledger.state import DEAD_SAMPLE, LedgerState
from april.wire.message import Version
from april.wire.rows import CHUNK, ROW, ReportRow, padded
from april.wire.training import WeightFolder
from april.wire.work import MAX_FORKS, session_lease_id

START_BITS = 32
"""Number of low bits of a lease id: the id is (starts of the broker << 32) | counter, so that ids never repeat."""

NO_ATTEMPT = ("abort", "leave", "recall")
"""Causes of a lease's end that do not count as a failed attempt."""

OFFERED_FOLDERS = 2
"""Number of snapshots of weights that workers are told of: where the newest is damaged, they use the one before."""
NONFINITE = "nonfinite"
"""Discard reason of a batch that the learner has skipped because its loss or gradient was not finite."""


# --- run and prompts --------------------------------------------------------------------------------------------------


def on_run_started(ledger: LedgerState, event: events.RunStarted, reference: Any) -> None:
    ledger.header = event


def on_broker_started(ledger: LedgerState, event: events.BrokerStarted, reference: Any) -> None:
    ledger.serials.starts, ledger.serials.last_lease_id = event.start, event.start << START_BITS
    ledger.dead_letters.groups_in_a_row = 0


def on_time_passed(ledger: LedgerState, event: events.TimePassed, reference: Any) -> None:
    ledger.now = event.at


def on_group_opened(ledger: LedgerState, event: events.GroupOpened, reference: Any) -> None:
    ordinal = -1
    if not event.evaluation:
        ordinal, ledger.serials.next_ordinal = ledger.serials.next_ordinal, ledger.serials.next_ordinal + 1
        if event.replaces is None:
            epoch, drawn = ledger.prompts.next
            place = event.row if event.number < 0 else drawn if epoch == event.epoch else 0
            ledger.prompts.next = (event.epoch, place + 1)
            if event.number >= 0:
                ledger.tallies.draw(event.number)
        else:
            ledger.dead_letters.drawn(event.replaces)
        ledger.account.counts[GroupState.OPEN] += 1
        ledger.bound.add(event.floor)
    group = Group(
        event.group, ordinal, event.evaluation, event.epoch, event.row, event.floor, reference, event.prompt_tokens,
        group_scored=event.group_scored, images=tuple(event.images), number=event.number,
    )  # fmt: skip
    kind, state = (AgentSample, SampleState.ACTING) if ledger.rules.agents else (Sample, SampleState.WAITING)
    group.samples = [kind(group, index, state) for index in range(event.size)]
    ledger.open_samples.add(group)
    if event.evaluation:
        ledger.evaluations.setdefault(event.floor, []).append(group)
    ledger.groups[group.id] = group
    ledger.serials.next_group = group.id + 1
    for sample in group.samples if ledger.rules.agents else group.samples[:1]:
        ledger.push(sample)  # for its siblings see `start_group`


def on_prompt_submitted(ledger: LedgerState, event: events.PromptSubmitted, reference: Any) -> None:
    ledger.prompts.submitted[event.row] = reference
    if event.images:
        ledger.prompts.images[event.row] = event.images
    ledger.prompts.submitted_count = event.row + 1


# --- leases and samples -----------------------------------------------------------------------------------------------


def on_leased(ledger: LedgerState, event: events.Leased, reference: Any) -> None:
    group = ledger.groups[event.group]
    ledger.serials.last_lease_id = event.lease_id
    leased = group.samples[event.index].find_fork(event.fork_number)
    assert leased
    lease = Lease(event.lease_id, leased, event.worker, event.step, event.scoring, float("inf"))
    begins_turn = ledger.rules.agents and lease.sample.sampled_until < lease.sample.length
    if lease.sample.state is SampleState.PARTIAL and not begins_turn:
        cached = lease.sample.cached_by(event.step) == event.worker
        ledger.account.resumed["cached" if cached else "moved"] += lease.sample.length
    for sample in lease.samples:
        sample.lease_id = event.lease_id
        ledger.open_samples.set_state(sample, SampleState.SCORING if event.scoring else SampleState.LEASED)
    ledger.leases.hold(lease)
    if not group.started:
        start_group(ledger, group, event.step)


def start_group(ledger: LedgerState, group: Group, step: int) -> None:
    """Note the policy step of a group's first lease, from which its staleness counts, and queue the other samples."""
    group.started = True
    if not group.evaluation:
        ledger.bound.remove(group.opened_at)
        ledger.bound.add(step)
    group.opened_at = step
    for sibling in group.samples_with_forks:
        if sibling.state in TO_GENERATE:
            ledger.queue.push(sibling)


def on_rows_accepted(ledger: LedgerState, event: events.RowsAccepted, reference: Any) -> None:
    record, length = reference or (0, event.payload_bytes)
    offset, trained, evaluated, leases = length - event.payload_bytes, 0, 0, ledger.leases
    images = dict(event.images)
    for row in ROW.iter_unpack(event.table):
        lease_id, _, start, tokens, incarnation, step, size, checksum, kind, finish, _, _, _ = row
        lease = leases.get(lease_id) or leases[session_lease_id(lease_id)]
        sample = fork_of_row(ledger, lease, ReportRow(*row)) if lease.agent else lease.sample
        sample.length = start + tokens
        if kind == CHUNK:
            group = sample.group
            lease.floor = sample.last_step = step
            group.tokens += tokens
            if group.evaluation:
                evaluated += tokens
                ledger.evaluated_versions.setdefault(step, Version(incarnation, step))
            else:
                trained += tokens
        else:
            sample.unsampled += tokens
            incarnation = step = 0
            if shown := images.get(lease_id):
                as_agent_sample(sample).images += tuple((name, start) for name in shown)
        sample.chunks = add_chunk_ref(sample.chunks, record, offset, size, checksum, tokens, kind, incarnation, step)
        offset += padded(size)
        if lease.agent:
            ledger.open_samples.set_state(sample, SampleState.PARTIAL)
            ledger.queue.push(sample)
        if finish:
            end_response(ledger, lease, ReportRow(*row))
    ledger.account.tokens["evaluation"] += evaluated
    ledger.account.tokens["generated"] += trained
    ledger.account.tokens["open"] += trained


def end_response(ledger: LedgerState, lease: Lease, row: ReportRow) -> None:
    """Apply a row with a finish reason: the response is complete or, with agents, the turn. If the row ends its lease,
    the sample waits for a scoring lease; otherwise the holder scores it under the same lease."""
    sample = lease.sample
    if ledger.rules.agents:
        return end_turn(ledger, lease)
    ledger.leases.end_generation(lease)
    sample.finish_reason = row.finish_reason
    ledger.open_samples.set_state(sample, SampleState.GENERATED if row.ends_lease else SampleState.SCORING)
    ledger.raise_expected_lengths(sample)
    if row.ends_lease:
        ledger.leases.release(lease.id)
        ledger.queue.push(sample)


def on_tokens_scored(ledger: LedgerState, event: events.TokensScored, reference: Any) -> None:
    samples = ledger.leases[event.lease_id].samples
    samples[0].group.place_token_scores(samples, reference or (0, 0), event.columns)


def on_sample_scored(ledger: LedgerState, event: events.SampleScored, reference: Any) -> None:
    lease = ledger.leases.release(event.lease_id)
    sample = lease.sample
    if lease.agent:
        ledger.end_session(sample, event.superseded)
    ledger.set_score(sample, event.reward, event.details)
    ledger.complete_if_done(sample.group)


def on_group_scored(ledger: LedgerState, event: events.GroupScored, reference: Any) -> None:
    lease = ledger.leases.release(event.lease_id)
    for sample, reward, details in zip(lease.samples, event.rewards, event.details, strict=True):
        ledger.set_score(sample, reward, details)
    ledger.complete_if_done(lease.sample.group)


def on_lease_ended(ledger: LedgerState, event: events.LeaseEnded, reference: Any) -> None:
    lease = ledger.leases.release(event.lease_id)
    samples, group = lease.samples, lease.sample.group
    starts_anew = lease.agent and event.cause == "agent_failed"
    if event.cause not in NO_ATTEMPT and (starts_anew or not lease.turn_completed):
        ledger.dead_letters.last_error = event.error or event.cause
        for session in (sample.session_sample for sample in samples):
            session.attempts, session.last_error = session.attempts + 1, ledger.dead_letters.last_error
    if starts_anew:
        ledger.leases.revoke(lease.sample)
        for fork in lease.sample.with_forks:
            ledger.cut(fork, 0, event.cause)
        ledger.end_forks(lease.sample, SampleState.DEAD)
    for sample in samples:
        session = sample.session_sample
        if session.attempts >= ledger.rules.max_attempts:
            ledger.dead_letters.add(session, event.at)
            if ledger.kill_sample(session, DEAD_SAMPLE):
                return
        elif sample.state is SampleState.SCORING:
            ledger.open_samples.set_state(sample, SampleState.GENERATED)
        elif starts_anew:
            ledger.open_samples.set_state(sample, SampleState.ACTING)
        elif not lease.agent:
            ledger.open_samples.set_state(sample, SampleState.PARTIAL if sample.length else SampleState.WAITING)
        sample.attempts = session.attempts
        if not lease.agent:
            sample.cache_worker = lease.worker if event.cause in NO_ATTEMPT else ""
    ledger.requeue_samples(group, samples)


def on_session_lost(ledger: LedgerState, event: events.SessionLost, reference: Any) -> None:
    group = ledger.groups[event.group]
    if not ledger.kill_sample(group.samples[event.index], "not_replayed"):
        ledger.requeue_samples(group, [])


# --- agents -----------------------------------------------------------------------------------------------------------


def on_agent_leased(ledger: LedgerState, event: events.AgentLeased, reference: Any) -> None:
    sample = as_agent_sample(ledger.groups[event.group].samples[event.index])
    sample.agent_lease, ledger.serials.last_lease_id = event.lease_id, event.lease_id + MAX_FORKS - 1
    ledger.leases.hold(Lease(event.lease_id, sample, event.holder, 0, False, float("inf"), agent=True))


def fork_of_row(ledger: LedgerState, session: Lease, row: ReportRow) -> Sample:
    """The fork of an agent's session to which `row` adds tokens. A row with an unknown fork number begins a new fork of
    the fork `row.parent`, which shares that fork's tokens up to `row.start`."""
    number = row.lease_id - session.id
    if fork := session.sample.find_fork(number):
        return fork
    parent_sample = session.sample.find_fork(row.parent)
    assert parent_sample
    fork = add_fork(parent_sample, number, row.start)
    ledger.open_samples.add_fork(fork)
    return fork


def end_turn(ledger: LedgerState, lease: Lease) -> None:
    """End the worker's lease of a complete turn. The agent acts next; the worker is recorded as the one that has the
    session's tokens in its KV cache."""
    sample = ledger.leases.release(lease.id).sample
    sample.cache_worker = lease.worker
    ledger.open_samples.set_state(sample, SampleState.ACTING)
    if agent := ledger.leases.get(sample.session_sample.agent_lease):
        agent.turn_completed = True


def on_agent_closed(ledger: LedgerState, event: events.AgentClosed, reference: Any) -> None:
    sample = as_agent_sample(ledger.leases.release(event.lease_id).sample)
    ledger.end_session(sample, event.superseded)
    sample.agent_state = event.state
    if event.said:
        sample.reward, sample.details = event.said
    ledger.open_samples.set_state(sample, SampleState.GENERATED)
    ledger.queue.push(sample)


# --- groups and evaluations -------------------------------------------------------------------------------------------


def on_group_discarded(ledger: LedgerState, event: events.GroupDiscarded, reference: Any) -> None:
    ledger.end_group(ledger.groups[event.group], event.reason)


def on_group_requeued(ledger: LedgerState, event: events.GroupRequeued, reference: Any) -> None:
    ledger.dead_letters.requeue(event.group)


def on_evaluation_recorded(ledger: LedgerState, event: events.EvaluationRecorded, reference: Any) -> None:
    ledger.forget_evaluation(event.step)
    ledger.evaluated[event.step] = event.result


def on_evaluation_restarted(ledger: LedgerState, event: events.EvaluationRestarted, reference: Any) -> None:
    ledger.forget_evaluation(event.step)


# --- rounds and batches -----------------------------------------------------------------------------------------------


def on_round_started(ledger: LedgerState, event: events.RoundStarted, reference: Any) -> None:
    ledger.rounds.number, ledger.rounds.open = event.round, True


def on_round_ended(ledger: LedgerState, event: events.RoundEnded, reference: Any) -> None:
    ledger.rounds.open, ledger.rounds.watermark = False, event.watermark


def on_drain_started(ledger: LedgerState, event: events.DrainStarted, reference: Any) -> None:
    ledger.rounds.draining, ledger.rounds.watermark = True, event.watermark


def on_drain_ended(ledger: LedgerState, event: events.DrainEnded, reference: Any) -> None:
    ledger.rounds.draining = False


def on_batch_delivered(ledger: LedgerState, event: events.BatchDelivered, reference: Any) -> None:
    groups = [ledger.groups[group] for group in event.groups]
    for group in groups:
        ledger.account.move(group, GroupState.DELIVERED)
        ledger.bound.remove(group.opened_at)
        ledger.ready.remove(group)
        group.step = event.step
    ledger.deliveries[event.step] = groups
    ledger.steps.next = event.step + 1


def on_batch_consumed(ledger: LedgerState, event: events.BatchConsumed, reference: Any) -> None:
    for group in ledger.deliveries[event.step]:
        created = [sample.sampled_tokens for sample in group.samples]
        live = group.live_samples
        trained = created if len(live) == len(created) else [sample.sampled_tokens for sample in live]
        ledger.account.move(group, GroupState.DISCARDED if event.discarded else GroupState.TRAINED)
        if event.discarded:
            ledger.account.count_discarded(group, event.discarded)
        ledger.cohorts.finish(group.ordinal, created, [] if event.discarded else trained)
    ledger.steps.consumed = event.step + 1
    ledger.steps.frontier = max(ledger.steps.frontier, ledger.steps.consumed)


def on_step_recorded(ledger: LedgerState, event: events.StepRecorded, reference: Any) -> None:
    ledger.recorded[event.step] = reference


def on_checkpoint_durable(ledger: LedgerState, event: events.CheckpointDurable, reference: Any) -> None:
    for step in [step for step in ledger.deliveries if step < event.oldest]:
        for group in ledger.deliveries.pop(step):
            del ledger.groups[group.id]
            ledger.prompts.forget(group.row)
            group.forget()
        ledger.recorded.pop(step, None)
    ledger.steps.durable = event.step


def on_learner_started(ledger: LedgerState, event: events.LearnerStarted, reference: Any) -> None:
    for step in range(event.step, ledger.steps.consumed):
        for group in ledger.deliveries[step]:
            if group.state is GroupState.DISCARDED:
                ledger.account.count_discarded(group, NONFINITE, -1)
            ledger.account.move(group, GroupState.DELIVERED)
    ledger.steps.consumed, ledger.learner.incarnation = event.step, event.incarnation
    ledger.learner.uid = event.uid
    ledger.learner.weights_address, ledger.learner.weights_key = event.weights_address, event.weights_key


def on_weight_folder_written(ledger: LedgerState, event: events.WeightFolderWritten, reference: Any) -> None:
    folder = WeightFolder(Version(event.incarnation, event.step), event.digest)
    ledger.learner.weight_folders = [folder, *ledger.learner.weight_folders][:OFFERED_FOLDERS]


TRANSITIONS: dict[type[events.Event], Callable[[LedgerState, Any, Any], None]] = {
    events.RunStarted: on_run_started,
    events.BrokerStarted: on_broker_started,
    events.GroupOpened: on_group_opened,
    events.PromptSubmitted: on_prompt_submitted,
    events.Leased: on_leased,
    events.AgentLeased: on_agent_leased,
    events.AgentClosed: on_agent_closed,
    events.RowsAccepted: on_rows_accepted,
    events.SessionLost: on_session_lost,
    events.TokensScored: on_tokens_scored,
    events.SampleScored: on_sample_scored,
    events.GroupScored: on_group_scored,
    events.LeaseEnded: on_lease_ended,
    events.GroupDiscarded: on_group_discarded,
    events.GroupRequeued: on_group_requeued,
    events.EvaluationRecorded: on_evaluation_recorded,
    events.EvaluationRestarted: on_evaluation_restarted,
    events.DrainStarted: on_drain_started,
    events.DrainEnded: on_drain_ended,
    events.RoundStarted: on_round_started,
    events.RoundEnded: on_round_ended,
    events.BatchDelivered: on_batch_delivered,
    events.BatchConsumed: on_batch_consumed,
    events.StepRecorded: on_step_recorded,
    events.CheckpointDurable: on_checkpoint_durable,
    events.LearnerStarted: on_learner_started,
    events.WeightFolderWritten: on_weight_folder_written,
    events.TimePassed: on_time_passed,
}
"""Event type -> function that applies an event of this type, given the state, the event and its journal reference."""
