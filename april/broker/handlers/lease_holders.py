"""Handles the messages that all lease holders (workers, scorers, agents processes) share: sessions, grants, heartbeats
and reports. Scorers send no other messages, so their handler is here too."""

import hashlib
import logging
import math
from itertools import accumulate, pairwise
from typing import ClassVar

import msgspec
import numpy as np

from april import wire
from april.broker.context import BrokerContext, MessageTable
from april.broker.ledger.admission import Verdict
from april.broker.ledger.commands import score_tokens
from april.broker.ledger.events import Said
from april.broker.ledger.samples import AgentSample, Group, Lease, Sample
from april.broker.peers import Peer
from april.data.rows import row_prompt
from april.wire import limits

log = logging.getLogger(__name__)


# --- grants -----------------------------------------------------------------------------------------------------------


def send_grant(context: BrokerContext, peer: Peer, lease: Lease) -> None:
    """Queue the grant of a lease to its holder. Several grants share a message, in which the task and the prompt of a
    group stand once."""
    sample = lease.sample.latest_fork if lease.scoring else lease.sample
    group, payloads = sample.group, context.payloads
    grants = context.peers.pending_for(peer).new_leases()
    responses = [each.latest_fork if lease.scoring else each for each in lease.samples]
    by_teacher = lease.scoring and context.ledger.rules.agents and teacher_of(context, group)
    forks = [fork for each in lease.samples for fork in each.sampled_forks] if by_teacher else []
    task_index, arrays = grants.task_indices.get(group.id), list(map(payloads.response_ids, [*responses, *forks]))
    peer.sent_bytes += sum(len(array.data) for array in arrays)
    if task_index is None:
        prompt = payloads.prompt(group.prompt)
        task_index = grants.add_task(task_of(context, group), prompt)
        peer.sent_bytes += len(prompt.data)
    observations = sample.observations if sample.length else []
    turn_start = observations[-1][1] if observations else 0
    budget = context.prompts.budget_of(group.evaluation, group.epoch, group.row)
    remaining_tokens, state, stops = budget - sample.length, b"", list[int]()
    if observations:
        state = payloads.environment_state(sample)
    if context.ledger.rules.agents:
        request = msgspec.msgpack.decode(state, type=wire.TurnRequest)
        state = (
            msgspec.msgpack.encode([each.agent_state for each in lease.samples])
            if lease.for_group
            else lease.sample.agent_state
        )
        remaining_tokens, stops = (
            min(remaining_tokens, request.max_tokens - (sample.length - turn_start)),
            request.stop_token_ids,
        )
    elif lease.for_group:
        state = msgspec.msgpack.encode(
            [payloads.environment_state(each) if each.observations else b"" for each in responses]
        )
    grant = wire.Grant(
        lease_id=lease.id,
        task_index=task_index,
        index=sample.index,
        scoring=lease.scoring,
        max_new_tokens=remaining_tokens,
        seed=sample_seed(context.config.seed, group.id, sample.index, sample.fork_number),
        finish_reason=sample.session_sample.finish_reason,
        hand_over=not lease.scoring and context.ledger.ends_with_generation(group),
        group_scored=[each.finish_reason for each in lease.samples] if lease.for_group else [],
        turns=len(observations),
        turn_start=turn_start,
        state=state,
        stop_token_ids=stops,
        shown_images=[] if lease.scoring else list(sample.images),
        forks=[fork.sampled_from for fork in forks],
        rewarded=lease.scoring and lease.sample.reward is not None,
    )
    grants.add(grant, arrays)


def task_of(context: BrokerContext, group: Group) -> wire.Task:
    """Build the `wire.Task` of a group: the fields that the grants of all its samples share."""
    row = context.payloads.row_of(group.evaluation, group.epoch, group.row)
    sampling = context.config.sampling
    drawn = context.prompts.held_out[group.epoch].settings if group.evaluation else sampling
    reward = context.payloads.reward_of(row)
    return wire.Task(
        group=group.id,
        evaluation=group.evaluation,
        label=row.label,
        reward=reward,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=0.0 if group.evaluation else sampling.min_p,
        row_prompt=row_prompt(row, context.config.reward.asked(reward)),
        teacher=teacher_of(context, group),
        images=list(group.images),
        max_response_tokens=context.prompts.budget_of(group.evaluation, group.epoch, group.row),
    )


def teacher_of(context: BrokerContext, group: Group) -> str:
    """Name of the teacher that scorers ask for the samples of a group; "" for none."""
    return "" if group.evaluation else context.prompts.teacher_of(group.epoch, group.row)


def sample_seed(run_seed: int, group: int, index: int, fork_number: int = 0) -> int:
    """A 63-bit sampling seed, distinct for every fork of every sample of a run, and the same on every resume.
    `run_seed`: the run's `seed`; `group`: id of the group; `index`: number of the sample in it; `fork_number`: 0 for
    the main sample."""
    name = f"{run_seed}/{group}/{index}" + (f"/{fork_number}" if fork_number else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --- all lease holders ------------------------------------------------------------------------------------------------


NOT_CURRENT = "the lease is not current"
TOO_MANY_FORKS = f"a session has at most {wire.MAX_FORKS} forks"


class LeaseHolderHandler:
    """Base class of the handlers of lease holders."""

    def __init__(self, context: BrokerContext):
        self.context = context
        self.config = context.config
        self.ledger = context.ledger
        self.peers = context.peers
        self.recorder = context.recorder
        self._lease_terms = math.nan, 0.0, 0.0
        """(time, expiry, latest end) of the newest leases, seconds: when they were granted, when they expire unless
        renewed, and up to when they can be renewed."""

    def record_instant(self, peer: Peer, instant: str, now: float) -> None:
        """Record an instant in the timeline of a lease holder, `joined` or `lost`; the base class records nothing."""

    def lease(self, sample: Sample, peer: Peer, step: int, now: float) -> Lease:
        """Lease a sample to a holder whose weights are at policy step `step`, and queue the grant."""
        if self._lease_terms[0] != now:  # leases are many: those of one pass share their times
            self._lease_terms = now, now + self.config.broker.lease_s, now + self.config.broker.max_run_s
        lease = self.ledger.lease(sample, peer.uid, step, *self._lease_terms[1:])
        send_grant(self.context, peer, lease)
        return lease

    # --- connecting and leaving -----------------------------------------------------------------------------

    def hello(self, peer: Peer, hello: wire.Hello, now: float) -> list[int]:
        """Open the session of a lease holder. Returns the ids of the leases that the holder reports in `hello`, but no
        longer holds by the ledger.

        Another process with the same role and name counts as dead and is told to stop.
        """
        for other in self.peers.holders():
            if other is not peer and other.uid == hello.uid:
                self.peers.close(other)
            elif other is not peer and (other.role, other.name) == (hello.role, hello.name):
                self.peers.send_control(other, wire.Stop(f"another {hello.role} has taken the name {hello.name}"))
                self.lose(other, "its successor has arrived", now)
        held = {lease_id for lease_id in hello.lease_ids if self._holds(hello.uid, lease_id)}
        self.ledger.renew(list(held), now + self.config.broker.lease_s)
        for lease in self.leases_of(hello.uid):
            if lease.id not in held:
                self.ledger.end_lease(lease.id, "lost", "its worker came back without it", now)
        self.record_instant(peer, "joined", now)
        return [lease_id for lease_id in hello.lease_ids if lease_id not in held]

    def after_welcome(self, peer: Peer) -> None:
        """Queue messages that a holder needs at the beginning of its session; the holder ignores messages before its
        `Welcome`. The base class queues none."""

    def lose(self, peer: Peer, why: str, now: float) -> None:
        """End the session and the leases of a holder that is gone; the samples wait for other holders. `why`: reason
        for the log."""
        leases = self.leases_of(peer.uid)
        holder, ids = f"{peer.role} {peer.name}", {"worker": peer.name}
        log.warning("%s is lost (%s); %d leases wait for another", holder, why, len(leases), extra=ids)
        for lease in leases:
            self.ledger.end_lease(lease.id, "lost", f"{holder} was lost: {why}", now)
        self.record_instant(peer, "lost", now)
        self.peers.close(peer)

    def goodbye(self, peer: Peer) -> None:
        for lease in self.leases_of(peer.uid):
            self.ledger.end_lease(lease.id, "leave")
        self.peers.close(peer)

    def cancel(self, peer: Peer, lease_id: int) -> None:
        """Tell a holder to drop a sample whose lease the broker has ended."""
        self.peers.send_control(peer, wire.Cancel([lease_id]))

    def leases_of(self, uid: str) -> list[Lease]:
        return [self.ledger.leases[lease_id] for lease_id in self.ledger.leases.held.get(uid, ())]

    def _holds(self, uid: str, lease_id: int) -> bool:
        lease = self.ledger.leases.get(lease_id)
        return lease is not None and lease.worker == uid

    # --- heartbeats and reports -----------------------------------------------------------------------------

    def on_heartbeat(self, peer: Peer, received: wire.Received, now: float) -> None:
        message = received.message
        if len(message.lease_ids) > self.config.security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        if message.slots and len(message.slots.tool_lease_ids) > self.config.security.max_leases:
            raise wire.WireError("more leases at a tool than a worker may hold")
        peer.slots = message.slots or peer.slots
        tally = self.peers.tallies[peer.uid]
        tally.emitted = max(tally.emitted, message.emitted_tokens)
        current = {lease_id for lease_id in message.lease_ids if self._holds(peer.uid, lease_id)}
        self.ledger.renew(list(current), now + self.config.broker.lease_s)
        self.peers.answer_heartbeat(peer, [lease_id for lease_id in message.lease_ids if lease_id not in current])

    def on_report(self, peer: Peer, received: wire.Received, now: float) -> None:
        """Handle a report: accept its new tokens, then end the leases that it closes."""
        if len(received.message.closings) > limits.MAX_REPORT_CLOSINGS:
            raise wire.WireError(f"a report ends at most {limits.MAX_REPORT_CLOSINGS} leases")
        values = values_by_lease(received)
        if received.packed and not values:
            self.take_rows(peer, received.packed, now)
        for closing in received.message.closings:
            if not self._holds(peer.uid, closing.lease_id):
                self.reject(peer, closing.lease_id, NOT_CURRENT)
            elif isinstance(closing, wire.Scored):
                self._accept_score(peer, closing, now, values.get(closing.lease_id, b""))
            elif isinstance(closing, wire.Closed):
                self._close_agent(peer, closing, now)
            else:
                self._accept_give_back(peer, closing, now)

    def take_rows(self, peer: Peer, packed: list[wire.PackedArray], now: float) -> None:
        """Accept the new tokens of a report, `packed` (rows and their payloads); the base class refuses them, as only
        some roles send tokens."""
        raise wire.WireError(f"a {peer.role} generates nothing")

    def _accept_score(self, peer: Peer, scored: wire.Scored, now: float, values: bytes) -> None:
        lease = self.ledger.leases[scored.lease_id]
        fault = score_fault(scored, len(lease.samples)) or token_score_fault(scored, lease, values)
        if fault:
            return self.reject(peer, lease.id, f"bad score: {fault}")
        if isinstance(scored, wire.TokenScored):
            values_so_far = joined_values(peer, scored, values)
            if values_so_far is None:
                return self.reject(peer, lease.id, "bad score: a part of its values does not follow the one before it")
            if len(values_so_far) < 4 * value_count(scored):
                peer.token_scores = lease.id, values_so_far
                return
            score_tokens(self.ledger, lease.id, scored.columns, values_so_far, scored.feedback)
        group = lease.sample.group
        if lease.agent and (group.group_scored or teacher_of(self.context, group)):
            said = None if group.group_scored else (scored.rewards[0], scored.details[0])
            return self._close_agent(peer, wire.Closed(lease.id, scored.superseded, scored.state), now, said)
        if lease.for_group:
            verdict = self.ledger.score_group(lease.id, scored.rewards, scored.details)
        else:
            verdict = self.ledger.score(lease.id, scored.rewards[0], scored.details[0], scored.superseded)
        if verdict is Verdict.GAP:
            return self.peers.nack(peer, lease.id, lease.sample.length)
        if verdict is Verdict.INVALID:
            return self._fail_without_turn(peer, lease, now)
        self.peers.acknowledge(peer, lease.id)

    def _close_agent(self, peer: Peer, closed: wire.Closed, now: float, said: Said | None = None) -> None:
        lease = self.ledger.leases[closed.lease_id]
        if not lease.agent:
            return self.reject(peer, lease.id, "bad closing: the lease is no session")
        if len(closed.superseded) > wire.MAX_FORKS:
            return self.reject(peer, lease.id, f"bad closing: {TOO_MANY_FORKS}")
        if len(closed.state) > limits.MAX_AGENT_STATE_BYTES:
            return self.reject(peer, lease.id, f"bad closing: a state has at most {limits.MAX_AGENT_STATE_BYTES} bytes")
        verdict = self.ledger.close_agent(lease.id, closed.superseded, closed.state, said)
        if verdict is Verdict.INVALID:
            return self._fail_without_turn(peer, lease, now)
        self.peers.acknowledge(peer, lease.id)

    def _fail_without_turn(self, peer: Peer, lease: Lease, now: float) -> None:
        """End an agent session as failed because the policy generated no turn in it that a reward could apply to."""
        self.ledger.end_lease(lease.id, "agent_failed", "the agent ended before it had an answer of the policy", now)
        self.peers.acknowledge(peer, lease.id)

    def _accept_give_back(self, peer: Peer, give_back: wire.GiveBack, now: float) -> None:
        lease = self.ledger.leases[give_back.lease_id]
        sample = lease.sample
        if give_back.cause == "agent_failed" and not lease.agent:
            return self.reject(peer, lease.id, "bad closing: the lease is no session")
        if not lease.scoring and give_back.length > sample.length:
            return self.peers.nack(peer, lease.id, sample.length)
        error = limits.clip(give_back.error)
        if error:
            ids = {"worker": peer.name, "group": sample.group.id, "sample": sample.index}
            self.context.failures.note(
                give_back.cause, error, f"sample {ids['group']}.{ids['sample']} came back", **ids
            )
        if give_back.cause == "environment_failed":
            self.recorder.add_observations(0, 0, failed=1)
        self.ledger.end_lease(lease.id, give_back.cause, error, now)
        self.peers.acknowledge(peer, lease.id)

    def reject(self, peer: Peer, lease_id: int, reason: str, tokens: int = 0) -> None:
        """Reject the report on a lease, for `reason`; `tokens`: number of sampled tokens that it contained."""
        self.peers.tallies[peer.uid].refused += tokens
        self.peers.reject(peer, lease_id, reason)

    MESSAGES: ClassVar[MessageTable] = {wire.Heartbeat: on_heartbeat, wire.Report: on_report}


def score_fault(scored: wire.Scored, responses: int) -> str:
    """Fault in the scores that a holder reports for a lease on `responses` responses; empty if they are valid."""
    if not len(scored.rewards) == len(scored.details) == responses:
        return "a reward, with its details, is for each response of the lease"
    if not all(map(limits.is_reward, scored.rewards)):
        return f"a reward is a finite number up to {limits.MAX_REWARD:g}"
    if len(scored.superseded) > wire.MAX_FORKS:
        return TOO_MANY_FORKS
    if any(
        limits.too_many_details(details) or not all(map(limits.is_reward, details.values()))
        for details in scored.details
    ):
        return f"a reward has at most {limits.MAX_REWARD_DETAILS} details, finite numbers up to {limits.MAX_REWARD:g}"
    return ""


def values_by_lease(received: wire.Received) -> dict[int, bytes]:
    """Token-score values (float32) of a report, by lease id; empty if it has none. Raises WireError if their number is
    not the one that `Report.closings` states. If a score is split over several reports, each report has to have all
    values that are still missing, or as many of them as a report can hold."""
    scored = [closing for closing in received.message.closings if isinstance(closing, wire.TokenScored)]
    if not scored:
        return {}
    if len({closing.lease_id for closing in scored}) < len(scored):
        raise wire.WireError("a report closes a lease once")
    counts = [value_count(closing) - closing.start for closing in scored]
    if len(counts) == 1:
        counts = [min(counts[0], limits.MAX_REPORT_BYTES // 4)]
    elif any(closing.start for closing in scored):
        raise wire.WireError("a closing whose values come in several reports is alone in them")
    if [array.dtype for array in received.packed] != ["f4"] or 4 * sum(counts) != len(received.packed[0].data):
        raise wire.WireError("a report with token scores has no rows, and one f4 array with the values of all of them")
    values = memoryview(received.packed[0].data)
    ends = list(accumulate(counts, initial=0))
    pairs = zip(scored, pairwise(ends), strict=True)
    return {closing.lease_id: bytes(values[4 * first : 4 * end]) for closing, (first, end) in pairs}


def value_count(scored: wire.TokenScored) -> int:
    """Number of values of all token scores in one `TokenScored`."""
    return sum(count for columns in scored.columns for count in columns.values())


def joined_values(peer: Peer, scored: wire.TokenScored, values: bytes) -> bytes | None:
    """Join the token-score values (float32) of one `TokenScored` that is split over several reports. Returns all values
    so far, or None if `values` do not begin where those of the report before ended."""
    (lease_id, before), peer.token_scores = peer.token_scores, (0, b"")
    if not scored.start:
        return values
    return before + values if (lease_id, len(before)) == (scored.lease_id, 4 * scored.start) else None


def token_score_fault(scored: wire.Scored, lease: Lease, values: bytes) -> str:
    """Fault in the token scores that a holder reports for the responses of a lease; empty if they are valid. `values`:
    the values, float32."""
    if not isinstance(scored, wire.TokenScored):
        return ""
    responses = [fork for sample in lease.samples for fork in sample.sampled_forks]
    if lease.agent or len(scored.columns) != len(responses):
        return "token scores are for each response of the lease, or fork of its sessions, and from no agent"
    if len(scored.feedback) not in (0, len(responses)):
        return "feedback is for each response of the lease"
    if sum(map(len, scored.feedback)) > limits.MAX_FEEDBACK_CHARACTERS:
        return f"the feedback of a score has at most {limits.MAX_FEEDBACK_CHARACTERS} characters"
    if 4 * value_count(scored) > limits.MAX_TOKEN_SCORE_BYTES:
        return f"token scores have at most {limits.MAX_TOKEN_SCORE_BYTES} bytes"
    for response, columns in zip(responses, scored.columns, strict=True):
        most = limits.MAX_TOKEN_SCORES
        if len(columns) > most or not all(fits(count, response) for count in columns.values()):
            return f"a response has at most {most} token scores, each with as many values as it has tokens or turns"
    return "" if np.isfinite(np.frombuffer(values, "<f4")).all() else "a token score is a finite number"


def fits(count: int, sample: Sample) -> bool:
    """Whether a token score may have `count` values: one for each turn, or the same number for each token of the
    response. In a session with an agent only the latter, and tokens before the first sampled one have no values."""
    tokens, turns = sample.length - sample.sampled_from, 0 if isinstance(sample, AgentSample) else sample.turns
    each, rest = divmod(count, tokens) if tokens else (count, 0)
    return 0 < count == turns or (1 <= each <= limits.MAX_VALUES_PER_TOKEN and not rest)


# --- scorers ----------------------------------------------------------------------------------------------------------


class ScorerHandler(LeaseHolderHandler):
    def on_holder_capacity(self, peer: Peer, received: wire.Received, now: float) -> None:
        peer.capacity = min(received.message.capacity, self.config.security.max_leases)

    def hand_out(self, now: float) -> None:
        """Grant leases to scorers with room, the least loaded first; none while the broker is drained."""
        queue = self.ledger.queue
        if self.ledger.rounds.draining or not self.ledger.rules.scored_apart or not queue.has_scoring:
            return
        ready = [peer for peer in self.peers.scorers() if self._has_room(peer)]
        while ready and (sample := queue.take_scoring()):
            peer = min(ready, key=lambda each: self._load(each) / each.capacity)
            self.lease(sample, peer, 0, now)
            ready = [peer for peer in ready if self._has_room(peer)]

    def _load(self, peer: Peer) -> int:
        """Number of leases the scorer holds."""
        return len(self.ledger.leases.held.get(peer.uid, ()))

    def _has_room(self, peer: Peer) -> bool:
        if not peer.control_route or self._load(peer) >= peer.capacity:
            return False
        return self.peers.has_credit(peer, self.context.credit_bytes)

    MESSAGES = LeaseHolderHandler.MESSAGES | {wire.HolderCapacity: on_holder_capacity}
