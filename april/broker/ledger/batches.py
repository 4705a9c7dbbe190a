"""Batches: which groups were delivered to the learner and which have been trained, the token account, the staleness
bound, and the rounds and drains in which batches are made."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from april.broker.ledger import events
from april.broker.ledger.queues import ReadyGroups
from april.broker.ledger.rules import LengthCohorts, Rules
from april.broker.ledger.samples import Group, GroupState

# --- token account ----------------------------------------------------------------------------------------------------


class Account:
    """Token account: counts every acknowledged token under exactly one state or discard reason. The account closes if
    no token is missing."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        """Acknowledged tokens by name: generated, evaluation, and the group states other than discarded."""
        self.discarded: Counter[str] = Counter()
        """Acknowledged tokens of discarded groups and of discarded parts of samples, by reason."""
        self.counts: Counter[str] = Counter()
        """Number of training groups by state, and of discarded ones also by reason."""

    def move(self, group: Group, state: GroupState) -> None:
        """Move a training group and its tokens to another state."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state is not GroupState.DISCARDED:
            self.tokens[group.state] -= group.tokens
        if state is not GroupState.DISCARDED:
            self.tokens[state] += group.tokens
        group.state = state

    def count_discarded(self, group: Group, reason: str, times: int) -> None:
        """Count a discarded group and its tokens under its reason; `times` is 1, or -1 to undo the count."""
        self.discarded[reason] += times * group.tokens
        self.counts[reason] += times

    @property
    def undelivered(self) -> int:
        """Number of training groups that are open or ready."""
        return self.counts[GroupState.OPEN] + self.counts[GroupState.READY]

    def account(self) -> dict[str, Any]:
        """The token account as in summary.json: acknowledged tokens by state and by discard reason."""
        names = ("generated", "trained", "delivered", "ready", "open")
        return {name: self.tokens[name] for name in names} | {
            "discarded": dict(self.discarded),
            "evaluation": self.tokens["evaluation"],
        }

    @property
    def closed(self) -> bool:
        """Whether the generated tokens equal the sum of trained, delivered, ready, open and discarded ones."""
        parts = sum(self.tokens[name] for name in ("trained", "delivered", "ready", "open"))
        return self.tokens["generated"] == parts + sum(self.discarded.values())


# --- staleness bound --------------------------------------------------------------------------------------------------


class StalenessBound:
    """Counts the undelivered groups by deadline.

    Let v0(g) be the step of the worker's version at the first lease of group g, S the largest staleness,
    d(g) = v0(g) + S the last batch that may train g, k the next batch and N its groups. The invariant is

        for every D >= k - 1:  #{undelivered g : d(g) <= D}  <=  (D - k + 1) * N

    At D = k - 1 it says that no group is overdue. A group is opened only if the invariant survives, and a
    batch is delivered only if it holds for k + 1 afterwards. No token of g is older than v0(g), so a token
    trained in batch k has a staleness of at most k - v0(g) <= S: the bound is a theorem, whatever the speeds,
    lengths and failures. It also keeps work from having to be thrown away: batches k .. D have room for every
    group that is due by D. And it lets work go on: the N oldest undelivered groups can always be delivered once
    they are complete, and a worker at step k can always open groups as long as fewer than N are undelivered.

        bound = StalenessBound(max_staleness=5, batch_groups=32)
        if bound.survives(next_step=k, opened_at=k):
            bound.add(k)
    """

    def __init__(self, max_staleness: int, batch_groups: int):
        self.max_staleness = max_staleness
        self.batch_groups = batch_groups
        self._due: Counter[int] = Counter()

    def deadline(self, opened_at: int) -> int:
        """Last batch that may train a group first leased at step `opened_at`."""
        return opened_at + self.max_staleness

    def add(self, opened_at: int) -> None:
        self._due[self.deadline(opened_at)] += 1

    def remove(self, opened_at: int) -> None:
        deadline = self.deadline(opened_at)
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]

    def holds(self, next_step: int) -> bool:
        """Whether the invariant holds with k = `next_step` for the groups counted now."""
        return self._holds(self._due, next_step)

    def survives(self, next_step: int, opened_at: int) -> bool:
        """Whether the invariant would hold with one more group first leased at step `opened_at`."""
        deadline = self.deadline(opened_at)
        return self._holds({**self._due, deadline: self._due[deadline] + 1}, next_step)

    def survives_delivery(self, next_step: int, delivered: Mapping[int, int]) -> bool:
        """Whether the invariant would hold for the batch after `next_step`.

        `delivered`: number of groups in batch `next_step` by the step they were opened at.
        """
        due = Counter(self._due)
        due.subtract({self.deadline(opened_at): count for opened_at, count in delivered.items()})
        return self._holds(due, next_step + 1)

    def _holds(self, due: Mapping[int, int], next_step: int) -> bool:
        total = 0
        for deadline in sorted(due):
            total += due[deadline]
            if total > max(0, deadline - next_step + 1) * self.batch_groups:
                return False
        return True


# --- batches ----------------------------------------------------------------------------------------------------------


NONFINITE = "nonfinite"
"""Discard reason of a batch that the learner skips because its loss or gradient was not finite."""


class Batches(Account):
    """The part of the ledger's state that deals with batches, from groups ready for one to the newest checkpoint."""

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
        """Number of batches that the learner's current weights contain."""
        self.frontier = 0
        """Largest value that `consumed` has had in this run."""
        self.durable = 0
        """Number of batches that the newest checkpoint on disk contains."""
        self.incarnation = -1
        """Number of the current learner start, from 0; -1 before the first. It distinguishes weights of equal step."""
        self.learner_uid = ""
        """Process uid of the learner of the current incarnation."""
        self.weights_address = ""
        self.weights_key = ""
        """Address and CURVE public key at which the learner publishes weights."""

    @property
    def first_kept_step(self) -> int:
        """Step of the oldest batch whose groups are still in the ledger."""
        return min(self.deliveries, default=self.consumed)

    def was_published(self, step: int, incarnation: int) -> bool:
        """Whether weights of this version can exist. Incarnation 0 counts as published before the learner's start."""
        return step <= self.frontier and incarnation <= max(0, self.incarnation)

    def _on_batch_delivered(self, event: events.BatchDelivered, reference: Any) -> None:
        groups = [self.groups[group] for group in event.groups]
        for group in groups:
            self.move(group, GroupState.DELIVERED)
            self.bound.remove(group.opened_at)
            self.ready.remove(group)
            group.step = event.step
        self.deliveries[event.step] = groups
        self.next_step = event.step + 1

    def _on_batch_consumed(self, event: events.BatchConsumed, reference: Any) -> None:
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

    def _on_learner_started(self, event: events.LearnerStarted, reference: Any) -> None:
        for step in range(event.step, self.consumed):
            for group in self.deliveries[step]:
                if group.state is GroupState.DISCARDED:
                    self.count_discarded(group, NONFINITE, -1)
                self.move(group, GroupState.DELIVERED)
        self.consumed, self.incarnation = event.step, event.incarnation
        self.learner_uid = event.uid
        self.weights_address, self.weights_key = event.weights_address, event.weights_key


# --- rounds and drains ------------------------------------------------------------------------------------------------


class Rounds:
    """The part of the ledger's state that deals with rounds and drains, and the aborts that both cause."""

    def __init__(self) -> None:
        self.round = -1
        """Number of the current or last round; -1 before the first."""
        self.round_open = False
        self.draining = False
        """Whether a drain is on: no lease is granted, and workers hand back the training samples that they generate."""
        self.watermark = 0
        """Lease id up to which workers have to hand back training samples."""

    def _on_round_started(self, event: events.RoundStarted, reference: Any) -> None:
        self.round, self.round_open = event.round, True

    def _on_round_ended(self, event: events.RoundEnded, reference: Any) -> None:
        self.round_open, self.watermark = False, event.watermark

    def _on_drain_started(self, event: events.DrainStarted, reference: Any) -> None:
        self.draining, self.watermark = True, event.watermark

    def _on_drain_ended(self, event: events.DrainEnded, reference: Any) -> None:
        self.draining = False
