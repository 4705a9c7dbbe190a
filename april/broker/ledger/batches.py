"""Batches: which groups the learner was given, which of them it has trained, and the staleness bound."""

from typing import Any

from april.broker.ledger import events
from april.broker.ledger.account import Account
from april.broker.ledger.bound import StalenessBound
from april.broker.ledger.cohorts import LengthCohorts
from april.broker.ledger.queues import ReadyGroups
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import Group, GroupState

NONFINITE = "nonfinite"
"""Reason for which the learner skips a batch: a loss or gradient was not finite."""


class Batches(Account):
    def __init__(self, rules: Rules):
        super().__init__()
        self.groups: dict[int, Group] = {}
        self.bound = StalenessBound(rules.max_staleness, rules.batch_groups)
        self.cohorts = LengthCohorts(rules.batch_groups)
        self.deliveries: dict[int, list[Group]] = {}
        self.ready = ReadyGroups()
        """Complete groups waiting for a batch."""
        self.next_step = 0
        """Number of the next batch to deliver."""
        self.consumed = 0
        """Batches that the learner's current weights contain."""
        self.frontier = 0
        """Largest value that `consumed` has had in this run."""
        self.durable = 0
        """Batches that the newest checkpoint on disk contains."""
        self.incarnation = -1
        """Learner starts, counted from 0; -1 before the first. It distinguishes weights of equal step."""
        self.learner_uid = ""
        """Uid of the learner process of this incarnation."""
        self.weights_address = ""
        self.weights_key = ""
        """Address and key under which the learner publishes weights."""

    @property
    def first_kept_step(self) -> int:
        """Oldest batch whose groups the ledger still has."""
        return min(self.deliveries, default=self.consumed)

    def was_published(self, step: int, incarnation: int) -> bool:
        """Whether weights of this version can exist. Incarnation 0 counts as published before the learner's start."""
        return step <= self.frontier and incarnation <= max(0, self.incarnation)

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
            created = [sample.sampled_tokens for sample in group.samples]
            live = group.live_samples
            trained = created if len(live) == len(created) else [sample.sampled_tokens for sample in live]
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
        self.consumed, self.incarnation = event.step, event.incarnation
        self.learner_uid = event.uid
        self.weights_address, self.weights_key = event.weights_address, event.weights_key
