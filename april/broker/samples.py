"""Groups, samples and leases: the plain data of the ledger and the queue that hands samples out."""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from april.version import Version


class SampleState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    PARTIAL = "partial"
    GENERATED = "generated"
    SCORING = "scoring"
    DONE = "done"
    DEAD = "dead"


class GroupState(StrEnum):
    OPEN = "open"
    READY = "ready"
    DELIVERED = "delivered"
    TRAINED = "trained"
    DISCARDED = "discarded"


TO_GENERATE = (SampleState.WAITING, SampleState.PARTIAL)


@dataclass(slots=True, eq=False)
class Sample:
    """Slot `index` of its group. Its tokens stay in the journal; `chunks` says where."""

    group: "Group"
    index: int
    state: SampleState = SampleState.WAITING
    length: int = 0
    """acknowledged response tokens"""
    segments: list[tuple[int, int, Version]] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    """references to the journal's records of its chunks, in order"""
    token: int = 0
    """of the current lease, 0 for none"""
    attempts: int = 0
    """leases that were lost or failed"""
    reward: float | None = None
    finish_reason: str = ""
    last_error: str = ""

    @property
    def first_step(self) -> int:
        """A worker must be at this step or later to go on with it, so that versions never decrease."""
        last = self.segments[-1][2].step if self.segments else 0
        return max(self.group.opened_at, last)


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt draw."""

    id: int
    ordinal: int
    """place among the training groups by creation; -1 for evaluation"""
    evaluation: bool
    epoch: int
    row: int
    opened_at: int
    """v0: the step of the worker's version at the first lease; before that, the least it can become"""
    prompt: Any
    """reference to the journal's record of its prompt"""
    prompt_tokens: int
    samples: list[Sample] = field(default_factory=list)
    state: GroupState = GroupState.OPEN
    started: bool = False
    tokens: int = 0
    """acknowledged response tokens of all samples"""
    step: int = -1
    """of its delivery"""

    @property
    def live_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.state is not SampleState.DEAD]

    @property
    def unfinished(self) -> bool:
        """Some sample still has tokens to come."""
        return any(sample.state in (*TO_GENERATE, SampleState.LEASED) for sample in self.samples)


@dataclass(slots=True)
class Lease:
    token: int
    sample: Sample
    worker: str
    step: int
    """of the worker's version when it was granted"""
    scoring: bool
    """granted to score only"""
    expires_at: float
    """on the caller's clock"""
    ends_at: float = float("inf")
    """the longest that renewals can keep it"""

    @property
    def generating(self) -> bool:
        return self.sample.state is SampleState.LEASED


class HandOutQueue:
    """Samples waiting for a lease, in the order in which they are handed out.

    What only lacks its score comes first, since it costs no slot; then what a deadline needs, evaluation,
    samples of started groups (oldest group first, lost work and partials before untouched siblings), and
    fresh groups. Entries that no longer wait are skipped when they surface.
    """

    def __init__(self):
        self._scoring: deque[Sample] = deque()
        self._evaluation: deque[Sample] = deque()
        self._started: list[tuple] = []
        self._arrivals = itertools.count()
        self._fresh: deque[Sample] = deque()

    def push(self, sample: Sample) -> None:
        group = sample.group
        if sample.state is SampleState.GENERATED:
            self._scoring.append(sample)
        elif group.evaluation:
            self._evaluation.append(sample)
        elif group.started:
            untouched = sample.attempts == 0 and sample.length == 0
            age = (group.opened_at, untouched, -sample.attempts, group.id, sample.index)
            heapq.heappush(self._started, (age, next(self._arrivals), sample))
        else:
            self._fresh.append(sample)

    def take_scoring(self) -> Sample | None:
        return _take(self._scoring, lambda sample: sample.state is SampleState.GENERATED)

    def take_evaluation(self, step: int) -> Sample | None:
        if self._evaluation and self._evaluation[0].first_step > step:
            return None
        return _take(self._evaluation, _waits_to_generate)

    def take_started(self, step: int, opened_by: int | None = None) -> Sample | None:
        """The first that a worker at `step` may go on with; `opened_by`: only of groups first leased by then."""
        held_back, found = [], None
        while self._started and found is None:
            entry = heapq.heappop(self._started)
            sample = entry[-1]
            if not _waits_to_generate(sample):
                continue
            if opened_by is not None and sample.group.opened_at > opened_by:
                held_back.append(entry)
                break
            if sample.first_step > step:
                held_back.append(entry)
                continue
            found = sample
        for entry in held_back:
            heapq.heappush(self._started, entry)
        return found

    def take_fresh(self, step: int) -> Sample | None:
        """A sample of a group that nobody has started; its siblings must be pushed again once it is leased."""
        while self._fresh:
            sample = self._fresh[0]
            if sample.group.started or not _waits_to_generate(sample):
                self._fresh.popleft()
            elif sample.first_step > step:
                return None
            else:
                return self._fresh.popleft()
        return None


def _waits_to_generate(sample: Sample) -> bool:
    return sample.state in TO_GENERATE and sample.group.state is GroupState.OPEN


def _take(queue: deque[Sample], still_waits) -> Sample | None:
    while queue:
        sample = queue.popleft()
        if still_waits(sample) and sample.group.state is GroupState.OPEN:
            return sample
    return None
