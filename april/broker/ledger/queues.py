"""The order in which samples are handed out, and complete groups are delivered."""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator

from april.broker.ledger.samples import TO_GENERATE, Group, GroupState, Sample, SampleState, lacks_agent

CLEANING_PUSHES = 1024
Order = tuple[int, ...]
"""of samples that wait"""


class Waiting:
    """Samples that wait for a lease, each for a worker at its `first_step` or later, in the order of the key that each
    is pushed with.

    An entry whose sample no longer waits, or has come to need a later step and was pushed again, is dropped when it
    surfaces, or when there are as many entries again as were left by the last such cleaning. Taking costs a look at
    each of the few steps that samples need, and a heap's logarithm.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._by_step: dict[int, list[tuple[Order, int, Sample]]] = {}
        self._pushes_to_cleaning = CLEANING_PUSHES

    def push(self, sample: Sample, order: Order) -> None:
        heap = self._by_step.setdefault(sample.first_step, [])
        heapq.heappush(heap, (order, next(self._arrivals), sample))
        self._pushes_to_cleaning -= 1
        if not self._pushes_to_cleaning:
            self._clean()

    def _clean(self) -> None:
        """Drop every entry that stands for nothing any more."""
        for first_step, heap in list(self._by_step.items()):
            heap[:] = [entry for entry in heap if _waits_from(entry[-1], first_step)]
            heapq.heapify(heap)
            if not heap:
                del self._by_step[first_step]
        self._pushes_to_cleaning = max(CLEANING_PUSHES, sum(map(len, self._by_step.values())))

    def first(self, step: int) -> list[tuple[Order, int, Sample]] | None:
        """The heap whose head goes first of all that a worker at `step` may go on with; None: nothing waits for it."""
        first = None
        for first_step, heap in list(self._by_step.items()):
            if first_step > step:
                continue
            while heap and not _waits_from(heap[0][2], first_step):
                heapq.heappop(heap)
            if not heap:
                del self._by_step[first_step]
            elif first is None or heap[0] < first[0]:
                first = heap
        return first

    def take(self, step: int) -> Sample | None:
        """The first that a worker at `step` may go on with."""
        first = self.first(step) if self._by_step else None
        return heapq.heappop(first)[2] if first else None


class HandOutQueue:
    """Samples waiting for a lease, by what they are; `choose_sample` has the order of the kinds.

    Within a kind: evaluation and fresh groups in the order of their creation, evaluation that was lost first; of
    started groups those first that were lost with their worker or failed, then partials and untouched siblings,
    oldest version first, and of one version those that are expected to become longest. What a deadline needs is taken
    from the started in the same order, but whether they were lost or not. Samples of agents also wait for somebody who
    runs the agent: those that were lost first, then by their creation.
    """

    def __init__(self) -> None:
        self._scoring: deque[Sample] = deque()
        self._evaluation, self._lost, self._started, self._fresh = Waiting(), Waiting(), Waiting(), Waiting()
        self._without_agent: dict[bool, list[tuple[Order, int, Sample]]] = {False: [], True: []}
        self._arrivals = itertools.count()

    def push(self, sample: Sample) -> None:
        if sample.state is SampleState.GENERATED:
            if not sample.group.together or sample.group.awaits_scores:
                self._scoring.append(sample)
        elif sample.group.evaluation:
            self._evaluation.push(sample, (not sample.attempts, *_place(sample)))
        elif sample.group.started:
            (self._lost if sample.attempts else self._started).push(sample, _age(sample))
        else:
            self._fresh.push(sample, _place(sample))

    def push_for_agent(self, sample: Sample) -> None:
        order = (not sample.attempts, *_place(sample))
        heapq.heappush(self._without_agent[sample.group.evaluation], (order, next(self._arrivals), sample))

    def take_for_agent(self, evaluation: bool) -> Sample | None:
        """One whose agent nobody runs."""
        heap = self._without_agent[evaluation]
        while heap:
            sample = heapq.heappop(heap)[-1]
            if lacks_agent(sample):
                return sample
        return None

    @property
    def has_scoring(self) -> bool:
        """Whether something waits for its score."""
        while self._scoring and not _waits_for_score(self._scoring[0]):
            self._scoring.popleft()
        return bool(self._scoring)

    def take_scoring(self) -> Sample | None:
        """One that waits for its score, or stands for its group, whose samples all do."""
        return self._scoring.popleft() if self.has_scoring else None

    def take_evaluation(self, step: int) -> Sample | None:
        return self._evaluation.take(step)

    def take_started(self, step: int) -> Sample | None:
        """Of a group that has been leased before."""
        return self._lost.take(step) or self._started.take(step)

    def take_due(self, step: int, opened_by: int) -> Sample | None:
        """Of a group first leased at step `opened_by` or before."""
        heap, lost = self._started.first(step), self._lost.first(step)
        if lost and (not heap or lost[0][0] < heap[0][0]):
            heap = lost
        return heapq.heappop(heap)[2] if heap and heap[0][2].group.opened_at <= opened_by else None

    def take_fresh(self, step: int) -> Sample | None:
        """Of a group that nobody has started; its siblings must be pushed again once it is leased."""
        return self._fresh.take(step)


class ReadyGroups:
    """Complete groups that wait for a batch, in order of completion, and how many of them have which age."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._by_age: Counter[int] = Counter()
        """by the step they were opened at"""

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
        """How many of the `count` oldest were opened at which step; a look at each step, not at each group."""
        ages: Counter[int] = Counter()
        for opened_at in sorted(self._by_age):
            ages[opened_at] = min(self._by_age[opened_at], count)
            count -= ages[opened_at]
            if not count:
                break
        return ages

    def oldest(self, count: int) -> list[Group]:
        """Of the same age those that completed first."""
        return heapq.nsmallest(count, self._groups.values(), key=lambda group: group.opened_at)


def _waits_from(sample: Sample, first_step: int) -> bool:
    waits = sample.state in TO_GENERATE and sample.group.state is GroupState.OPEN
    return waits and sample.first_step == first_step


def _waits_for_score(sample: Sample) -> bool:
    return sample.state is SampleState.GENERATED and sample.group.state is GroupState.OPEN


def _place(sample: Sample) -> Order:
    return sample.group.id, sample.index


def _age(sample: Sample) -> Order:
    untouched = sample.attempts == 0 and sample.length == 0
    return sample.group.opened_at, untouched, -sample.expected_length, *_place(sample)
