"""Agents' sessions: who runs them, their turns and branches, and what of them is cut."""

from collections.abc import Callable, Sequence
from typing import Any

from april.broker.ledger import events
from april.broker.ledger.batches import Batches
from april.broker.ledger.branches import fork, known
from april.broker.ledger.leases import LeaseBook
from april.broker.ledger.open_samples import OpenSamples
from april.broker.ledger.queues import HandOutQueue
from april.broker.ledger.rounds import Rounds
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import AgentSample, Lease, Sample, SampleState, of_agent
from april.wire.agents import BRANCHES

OnDiscard = Callable[[Sequence[Sample], str, int], None]
"""samples of one training group, why they are discarded, and how many tokens of their beginning are not"""


class Conversations(LeaseBook, Batches, Rounds):
    def __init__(self, rules: Rules):
        LeaseBook.__init__(self)
        Batches.__init__(self, rules)
        Rounds.__init__(self)
        self.rules = rules
        self.on_discard: OnDiscard = lambda samples, reason, kept: None
        """is shown them as they were"""
        self.open_samples = OpenSamples()
        self.queue = HandOutQueue()
        self.last_lease_id = 0
        """of all that were granted"""

    def _on_AgentLeased(self, event: events.AgentLeased, reference: Any) -> None:
        sample = of_agent(self.groups[event.group].samples[event.index])
        sample.agent_lease, self.last_lease_id = event.lease_id, event.lease_id + BRANCHES - 1
        self.hold(Lease(event.lease_id, sample, event.holder, 0, False, float("inf"), agent=True))

    def _spoken_in(self, session: Lease, lease_id: int, start: int, parent: int) -> Sample:
        """The branch that a row of an agent goes on with, or begins, whose id is `lease_id`."""
        number = lease_id - session.id
        if line := session.sample.line(number):
            return line
        left = session.sample.line(parent)
        assert left
        new = fork(left, number, start)
        self.open_samples.begin(new)
        return new

    def _end_turn(self, lease: Lease) -> None:
        """Its last tokens have come, and it is its agent's again; the worker has its prefix in cache."""
        sample = self.release(lease.id).sample
        sample.home = lease.worker
        self.open_samples.turn(sample, SampleState.ACTING)
        if agent := self.leases.get(sample.session.agent_lease):
            agent.advanced = True

    def _on_AgentClosed(self, event: events.AgentClosed, reference: Any) -> None:
        sample = of_agent(self.release(event.lease_id).sample)
        self._end_session(sample, event.superseded)
        sample.left = event.state
        self.open_samples.turn(sample, SampleState.GENERATED)
        self.queue.push(sample)

    def _end_session(self, sample: Sample, superseded: list[tuple[int, int]]) -> None:
        """The agent has spoken for the last time. A turn that it has not heard the end of is nobody's, and neither is
        what only an earlier execution of it has heard."""
        self.void(sample)
        for line, heard, length in known(sample, superseded):
            self._cut(line, heard, "unread")
            self._cut(line, length, "superseded")
        self._end_branches(sample, SampleState.DONE)
        sample.finish_reason = "stop"

    def _end_branches(self, sample: Sample, state: SampleState) -> None:
        """Those in which nothing is left that the policy has said are forgotten."""
        if not isinstance(sample, AgentSample):
            return
        for line in sample.branches:
            self.open_samples.turn(line, state)
            if not line.own:
                self.open_samples.forget(line)
        sample.branches = tuple(line for line in sample.branches if line.own)

    def _cut(self, sample: Sample, length: int, reason: str) -> None:
        """Discard what lies behind the end of a turn of a sample whose group is open."""
        group = sample.group
        if sample.sampled_until > length and not group.evaluation:
            self.on_discard([sample], reason, length)
        dropped = sample.cut(length)
        group.tokens -= dropped
        if dropped and not group.evaluation:
            self.tokens[group.state] -= dropped
            self.discarded[reason] += dropped
