"""The groups of a batch: the staleness bound, the complete groups that wait for a batch, and the cohorts in which
trained response lengths are compared with created ones."""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping

import msgspec

from april.broker.ledger.samples import Group

# --- staleness bound --------------------------------------------------------------------------------------------------


class StalenessBound:
    """Counts the undelivered groups by deadline.

    Let v0(g) be the step of the worker's version at the first lease of group g, S the largest staleness,
    d(g) = v0(g) + S the last batch that may train g, k the next batch and N its groups. The invariant is

        for every D >= k - 1:  #{undelivered g : d(g) <= D}  <=  (D - k + 1) * N

    At D = k - 1 it says that no group is overdue (d(g) < k). A group is opened only if the invariant survives, and a
    batch is delivered only if it holds for k + 1 afterwards. No token of g is older than v0(g), so a token trained in
    batch k has a staleness of at most k - v0(g) <= S: the bound is a theorem, whatever the speeds, lengths and
    failures. It also keeps work from having to be thrown away: batches k .. D have room for every group that may be
    trained in batch D at the latest. And it lets work go on: the N oldest undelivered groups can always be delivered
    once they are complete, and a worker at step k can always open groups as long as fewer than N are undelivered.

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
        """Whether the bound's invariant (see the class) holds for the groups counted now, with k = `next_step` as the
        next batch."""
        return self._holds(self._due, next_step)

    def survives(self, next_step: int, opened_at: int) -> bool:
        """Whether the bound's invariant (see the class) would still hold, with k = `next_step` as the next batch, if
        one more group were opened by a worker at policy step `opened_at`."""
        deadline = self.deadline(opened_at)
        return self._holds({**self._due, deadline: self._due[deadline] + 1}, next_step)

    def survives_delivery(self, next_step: int, delivered: Mapping[int, int]) -> bool:
        """Whether the bound's invariant (see the class) would hold for batch `next_step` + 1 after the delivery of
        batch `next_step`.

        `delivered`: number of groups in batch `next_step` by the policy step at which they were opened.
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


# --- ready groups -----------------------------------------------------------------------------------------------------


class ReadyGroups:
    """Complete groups waiting for a batch, in order of completion, and their number by the policy step at which they
    were opened (first leased)."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._by_age: Counter[int] = Counter()
        """Number of groups by the policy step at which they were opened."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __contains__(self, group: Group) -> bool:
        return group.id in self._groups

    def add(self, group: Group) -> None:
        self._groups[group.id] = group
        self._by_age[group.opened_at] += 1

    def remove(self, group: Group) -> None:
        del self._groups[group.id]
        self._by_age[group.opened_at] -= 1
        if not self._by_age[group.opened_at]:
            del self._by_age[group.opened_at]

    def ages_of_oldest(self, count: int) -> Counter[int]:
        """Policy step -> number of the groups, among the `count` oldest ones, that were opened at that step; takes time
        in proportion to the steps, not to the groups."""
        ages: Counter[int] = Counter()
        for opened_at in sorted(self._by_age):
            ages[opened_at] = min(self._by_age[opened_at], count)
            count -= ages[opened_at]
            if not count:
                break
        return ages

    def oldest(self, count: int) -> list[Group]:
        """The `count` groups opened at the earliest policy steps; among equals those that completed first."""
        return heapq.nsmallest(count, self._groups.values(), key=lambda group: group.opened_at)


# --- length cohorts ---------------------------------------------------------------------------------------------------


Lengths = Counter[int]
"""Number of responses by length in tokens."""

RECENT_BATCHES = 20
"""Length of each window of the length comparison, as a multiple of the groups in a batch: one window of the newest
trained groups, one of the newest created groups."""


class LengthCohorts(msgspec.Struct):
    """Response lengths by cohort (groups created one after the other), to compare trained lengths with created ones.

    A cohort is settled once each of its groups is trained or discarded, so that short responses, which finish first,
    are never compared with longer ones still being generated.
    """

    cohort_groups: int
    settled: int = 0
    """Number of settled cohorts: those whose groups are all trained or discarded. Cohorts settle in order, so this is
    also the number of the first one that is not settled."""
    created: Lengths = msgspec.field(default_factory=Counter)
    trained: Lengths = msgspec.field(default_factory=Counter)
    waiting: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
    """(created, trained): lengths of all responses, and of the trained ones, of each group that is trained or discarded
    while other groups of its cohort are not; by number of the cohort, then by number of the group."""
    lately_trained: deque[list[int]] = msgspec.field(default_factory=deque)
    lately_created: deque[list[int]] = msgspec.field(default_factory=deque)
    """Response lengths, a list for each group, of the newest trained groups (`lately_trained`), and of the newest
    groups in settled cohorts, trained or discarded (`lately_created`); `recent_groups` groups each at most."""

    def __post_init__(self) -> None:
        self.lately_trained = deque(self.lately_trained, maxlen=self.recent_groups)
        self.lately_created = deque(self.lately_created, maxlen=self.recent_groups)

    @property
    def recent_groups(self) -> int:
        """Most groups in each of the windows `lately_trained` and `lately_created`."""
        return RECENT_BATCHES * self.cohort_groups

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """Record that training group number `ordinal` has ended: `created` has the lengths of all its responses,
        `trained` those of the trained ones, in tokens.

        Idempotent: a restarted learner trains groups again.
        """
        cohort = ordinal // self.cohort_groups
        if cohort < self.settled:
            return
        ended = self.waiting.setdefault(cohort, {})
        if trained and ordinal not in ended:
            self.lately_trained.append(trained)
        ended[ordinal] = (created, trained)
        while len(self.waiting.get(self.settled, ())) == self.cohort_groups:
            for group_created, group_trained in self.waiting.pop(self.settled).values():
                self.created.update(group_created)
                self.lately_created.append(group_created)
                self.trained.update(group_trained)
            self.settled += 1
