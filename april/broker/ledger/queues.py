"""The queues of the ledger: samples waiting for a lease, in the order in which they are handed out."""

import heapq
import itertools
from collections import deque

from april.broker.ledger.samples import TO_GENERATE, GroupState, Sample, SampleState, needs_agent

CLEANING_PUSHES = 1024
"""Least number of pushes between two removals of all stale entries from a queue."""
Order = tuple[int, ...]
"""Sort key of a waiting sample; the sample with the smallest key is leased first."""


class WaitingSamples:
    """A priority queue of samples waiting for a lease, each for a worker at its `first_step` or later.

    An entry becomes stale when its sample stops waiting, or needs a later step and is pushed again with that step. A
    stale entry is dropped when it reaches the head, or by a cleaning once the queue may have doubled since the last
    one. Taking a sample costs one look per distinct `first_step` and O(log n).
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
        """Drop every stale entry."""
        for first_step, heap in list(self._by_step.items()):
            heap[:] = [entry for entry in heap if _waits_from(entry[-1], first_step)]
            heapq.heapify(heap)
            if not heap:
                del self._by_step[first_step]
        self._pushes_to_cleaning = max(CLEANING_PUSHES, sum(map(len, self._by_step.values())))

    def first(self, step: int) -> list[tuple[Order, int, Sample]] | None:
        """The heap of (order, arrival number, sample) whose head is the first of the samples that a worker at policy
        step `step` may take (`first_step` up to `step`); None if there is none."""
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
        """Remove and return the first of the samples that a worker at policy step `step` may take (`first_step` up to
        `step`); None if there is none."""
        first = self.first(step) if self._by_step else None
        return heapq.heappop(first)[2] if first else None

    def take_exactly(self, step: int) -> Sample | None:
        """Remove and return the first sample whose `first_step` is `step`; None if there is none."""
        while heap := self._by_step.get(step):
            if _waits_from(sample := heapq.heappop(heap)[2], step):
                return sample
        self._by_step.pop(step, None)
        return None


class HandOutQueue:
    """Samples waiting for a lease, one queue per kind; `choose_sample` defines the order of the kinds.

    Evaluation: samples of lost or failed leases first, then by creation. Fresh groups, of which no sample has been
    leased: by creation. Started groups: samples of lost or failed leases first; then by the policy step at which the
    group was first leased, the earliest first, and at equal steps partial responses before untouched ones, and large
    expected lengths before small ones. `take_due` takes samples of started groups in the latter order, lost or not.
    Agents' samples also wait for an agents process: lost ones first, then by creation.
    """

    def __init__(self) -> None:
        self._scoring: deque[Sample] = deque()
        self._evaluation, self._lost, self._started, self._fresh = (
            WaitingSamples(),
            WaitingSamples(),
            WaitingSamples(),
            WaitingSamples(),
        )
        self._without_agent: dict[bool, list[tuple[Order, int, Sample]]] = {False: [], True: []}
        self._arrivals = itertools.count()

    def push(self, sample: Sample) -> None:
        if sample.state is SampleState.GENERATED:
            if not sample.group.group_scored or sample.group.awaits_scores:
                self._scoring.append(sample)
        elif sample.group.evaluation:
            self._evaluation.push(sample, (not sample.attempts, *_creation_order(sample)))
        elif sample.group.started:
            (self._lost if sample.attempts else self._started).push(sample, _started_order(sample))
        else:
            self._fresh.push(sample, _creation_order(sample))

    def push_for_agent(self, sample: Sample) -> None:
        order = (not sample.attempts, *_creation_order(sample))
        heapq.heappush(self._without_agent[sample.group.evaluation], (order, next(self._arrivals), sample))

    def take_for_agent(self, evaluation: bool) -> Sample | None:
        """Remove and return a sample that no agents process runs: a training sample or, with `evaluation`, an
        evaluation sample. None if none waits."""
        heap = self._without_agent[evaluation]
        while heap:
            sample = heapq.heappop(heap)[-1]
            if needs_agent(sample):
                return sample
        return None

    @property
    def has_scoring(self) -> bool:
        """Whether a sample or a whole group waits for its score."""
        while self._scoring and not _waits_for_score(self._scoring[0]):
            self._scoring.popleft()
        return bool(self._scoring)

    def take_scoring(self) -> Sample | None:
        """Remove and return a sample that waits for its score, or the first sample of a group that is scored as a
        whole; None if there is none."""
        return self._scoring.popleft() if self.has_scoring else None

    def take_evaluation(self, step: int) -> Sample | None:
        """Remove and return a sample of the evaluation of policy step `step`; None if there is none."""
        return self._evaluation.take_exactly(step)

    def take_started(self, step: int) -> Sample | None:
        """Remove and return a sample, for a worker at policy step `step`, of a group of which some sample has been
        leased; None if there is none."""
        return self._lost.take(step) or self._started.take(step)

    def take_due(self, step: int, opened_by: int) -> Sample | None:
        """Remove and return a sample, for a worker at policy step `step`, of a group that was first leased at policy
        step `opened_by` or before; None if there is none."""
        heap, lost = self._started.first(step), self._lost.first(step)
        if lost and (not heap or lost[0][0] < heap[0][0]):
            heap = lost
        return heapq.heappop(heap)[2] if heap and heap[0][2].group.opened_at <= opened_by else None

    def take_fresh(self, step: int) -> Sample | None:
        """Remove and return the first sample, for a worker at policy step `step`, of a group of which no sample has
        been leased; None if there is none. Its siblings must be pushed again once it is leased, since the group is then
        started."""
        return self._fresh.take(step)


def _waits_from(sample: Sample, first_step: int) -> bool:
    waits = sample.state in TO_GENERATE and sample.group.state is GroupState.OPEN
    return waits and sample.first_step == first_step


def _waits_for_score(sample: Sample) -> bool:
    return sample.state is SampleState.GENERATED and sample.group.state is GroupState.OPEN


def _creation_order(sample: Sample) -> Order:
    return sample.group.id, sample.index


def _started_order(sample: Sample) -> Order:
    untouched = sample.attempts == 0 and sample.length == 0
    return sample.group.opened_at, untouched, -sample.expected_length, *_creation_order(sample)
