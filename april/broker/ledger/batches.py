"""Batches: what the learner was given, what it has made of it, and the bound on their age."""

from typing import Any

from april.broker.ledger import events
from april.broker.ledger.account import Account
from april.broker.ledger.bound import StalenessBound
from april.broker.ledger.cohorts import LengthCohorts
from april.broker.ledger.queues import ReadyGroups
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import Group, GroupState

NONFINITE = "nonfinite"
"""why the learner passes a batch without training it"""


class Batches(Account):
    def __init__(self, rules: Rules):
        super().__init__()
        self.groups: dict[int, Group] = {}
        self.bound = StalenessBound(rules.max_staleness, rules.batch_groups)
        self.cohorts = LengthCohorts(rules.batch_groups)
        self.deliveries: dict[int, list[Group]] = {}
        self.ready = ReadyGroups()
        """complete groups that wait for a batch"""
        self.next_step = 0
        """the next batch to deliver"""
        self.consumed = 0
        """batches in the learner's weights"""
        self.frontier = 0
        """most batches any learner of this run has consumed"""
        self.durable = 0
        """batches in the newest checkpoint on disk"""
        self.branch = -1
        self.learner_uid = ""
        """the learner process that the branch belongs to"""
        self.weights_address = ""
        self.weights_key = ""
        """where it publishes"""

    @property
    def first_kept_step(self) -> int:
        return min(self.deliveries, default=self.consumed)

    def was_published(self, step: int, branch: int) -> bool:
        """Whether a worker can have weights of that name; the first ones may reach it ahead of the learner's start."""
        return step <= self.frontier and branch <= max(0, self.branch)

    def _on_BatchDelivered(self, event: events.BatchDelivered, reference: Any) -> None:
        groups = [self.groups[group] for group in event.groups]
        for group in groups:
            self.move(group, GroupState.DELIVERED)
            self.bound.remove(group.opened_at)
            self.ready.remove(group)
            group.step = event.step
        self.deliveries[event.step] = groups
        self.next_step = event.step + 1

    def _on_BatchConsumed(self, event: events.BatchConsumed, reference: Any) -> None:
        for group in self.deliveries[event.step]:
            created = [sample.sampled for sample in group.samples]
            live = group.live_samples
            trained = created if len(live) == len(created) else [sample.sampled for sample in live]
            self.move(group, GroupState.DISCARDED if event.discarded else GroupState.TRAINED)
            if event.discarded:
                self.count_discarded(group, event.discarded, 1)
            self.cohorts.finish(group.ordinal, created, [] if event.discarded else trained)
        self.consumed = event.step + 1
        self.frontier = max(self.frontier, self.consumed)

    def _on_LearnerStarted(self, event: events.LearnerStarted, reference: Any) -> None:
        for step in range(event.step, self.consumed):
            for group in self.deliveries[step]:
                if group.state is GroupState.DISCARDED:
                    self.count_discarded(group, NONFINITE, -1)
                self.move(group, GroupState.DELIVERED)
        self.consumed, self.branch = event.step, event.branch
        self.learner_uid = event.uid
        self.weights_address, self.weights_key = event.weights_address, event.weights_key
