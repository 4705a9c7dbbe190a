"""Agent sessions in the ledger: their leases, turns and forks, and the tokens that are discarded when a session
ends."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from april.broker.ledger import events
from april.broker.ledger.batches import Batches, Rounds
from april.broker.ledger.leases import LeaseBook, OpenSamples
from april.broker.ledger.queues import HandOutQueue
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import AgentSample, Lease, Sample, SampleState, as_agent_sample
from april.wire.work import MAX_FORKS

# --- forks ------------------------------------------------------------------------------------------------------------


Superseded = Sequence[tuple[int, int]]
"""(fork number, length) per fork: tokens after `length` were seen only by an earlier execution of the agent, and are
discarded."""


def add_fork(parent: Sample, number: int, shared_tokens: int) -> Sample:
    """Add a fork to the session of `parent`. The fork shares the first `shared_tokens` tokens of `parent`, which end a
    turn."""
    new = AgentSample(parent.group, parent.index, SampleState.PARTIAL, cache_worker=parent.cache_worker)
    for ref in parent.chunk_refs:
        if new.length < shared_tokens:
            new.extend(ref._replace(observed=True))
    new.main_sample, new.fork_number = parent.session_sample, number
    new.parent_fork, new.shared_tokens = parent.fork_number, shared_tokens
    as_agent_sample(parent.session_sample).forks += (new,)
    return new


def fork_position(session: Sample, number: int, start: int, parent: int) -> tuple[int, bool]:
    """(length of fork `number` in tokens, whether the agent may append an observation to it).

    A fork that does not exist yet may begin at the end of a complete turn of its parent, or at token 0.
    """
    if fork := session.find_fork(number):
        return fork.length, fork.state is SampleState.ACTING
    parent_sample = session.find_fork(parent)
    return start, parent_sample is not None and parent_sample.last_turn_end(start) == start


def turn_ends_by_fork(session: Sample, superseded: Superseded) -> Iterator[tuple[Sample, int, int]]:
    """(fork, end of its last complete turn, end of its last turn known to the newest execution of the agent), in
    tokens, for each fork of a session."""
    known_lengths = dict(superseded)
    for fork in session.with_forks:
        known = known_lengths.get(fork.fork_number, fork.length)
        yield fork, fork.complete_turns_length, fork.last_turn_end(known)


def has_known_answer(session: Sample, superseded: Superseded) -> bool:
    """Whether the newest execution of the agent has received any answer of the policy."""
    return any(length for _, _, length in turn_ends_by_fork(session, superseded))


# --- sessions ---------------------------------------------------------------------------------------------------------


OnDiscard = Callable[[Sequence[Sample], str, int], None]
"""Callback for discarded tokens: (samples of one training group, reason of the discard, number of leading tokens that
are kept)."""


class AgentSessions(LeaseBook, Batches, Rounds):
    """The part of the ledger's state that deals with agent sessions; it builds on leases, batches and rounds."""

    def __init__(self, rules: Rules):
        LeaseBook.__init__(self)
        Batches.__init__(self, rules)
        Rounds.__init__(self)
        self.rules = rules
        self.on_discard: OnDiscard = lambda samples, reason, kept: None
        """Callback called before tokens are discarded, while the samples still have them."""
        self.open_samples = OpenSamples()
        self.queue = HandOutQueue()
        self.last_lease_id = 0
        """Largest lease id granted so far."""

    def _on_agent_leased(self, event: events.AgentLeased, reference: Any) -> None:
        sample = as_agent_sample(self.groups[event.group].samples[event.index])
        sample.agent_lease, self.last_lease_id = event.lease_id, event.lease_id + MAX_FORKS - 1
        self.hold(Lease(event.lease_id, sample, event.holder, 0, False, float("inf"), agent=True))

    def _fork_of_row(self, session: Lease, lease_id: int, start: int, parent: int) -> Sample:
        """The fork to which an agent's row adds tokens; a row with an unknown fork id begins a new fork after `start`
        tokens."""
        number = lease_id - session.id
        if fork := session.sample.find_fork(number):
            return fork
        parent_sample = session.sample.find_fork(parent)
        assert parent_sample
        fork = add_fork(parent_sample, number, start)
        self.open_samples.add_fork(fork)
        return fork

    def _end_turn(self, lease: Lease) -> None:
        """End the lease of a complete turn: the agent acts next; the worker is recorded as having the prefix in its KV
        cache."""
        sample = self.release(lease.id).sample
        sample.cache_worker = lease.worker
        self.open_samples.set_state(sample, SampleState.ACTING)
        if agent := self.leases.get(sample.session_sample.agent_lease):
            agent.turn_completed = True

    def _on_agent_closed(self, event: events.AgentClosed, reference: Any) -> None:
        sample = as_agent_sample(self.release(event.lease_id).sample)
        self._end_session(sample, event.superseded)
        sample.agent_state = event.state
        self.open_samples.set_state(sample, SampleState.GENERATED)
        self.queue.push(sample)

    def _end_session(self, sample: Sample, superseded: list[tuple[int, int]]) -> None:
        """End an agent session: discard incomplete turns, and tokens that only an earlier execution of the agent has
        received."""
        self.revoke(sample)
        for fork, complete_turns_length, known_length in turn_ends_by_fork(sample, superseded):
            self._cut(fork, complete_turns_length, "unread")
            self._cut(fork, known_length, "superseded")
        self._end_forks(sample, SampleState.DONE)
        sample.finish_reason = "stop"

    def _end_forks(self, sample: Sample, state: SampleState) -> None:
        """Mark all forks of a session as ended, and remove forks without sampled tokens."""
        if not isinstance(sample, AgentSample):
            return
        for fork in sample.forks:
            self.open_samples.set_state(fork, state)
            if not fork.own_sampled_tokens:
                self.open_samples.remove_fork(fork)
        sample.forks = tuple(fork for fork in sample.forks if fork.own_sampled_tokens)

    def _cut(self, sample: Sample, length: int, reason: str) -> None:
        """Discard a sample's tokens after offset `length`, the end of a turn; the sample's group must be open."""
        group = sample.group
        if sample.sampled_until > length and not group.evaluation:
            self.on_discard([sample], reason, length)
        dropped = sample.cut(length)
        group.tokens -= dropped
        if dropped and not group.evaluation:
            self.tokens[group.state] -= dropped
            self.discarded[reason] += dropped
