"""Groups, samples and leases: the plain data of the ledger and the queue that hands samples out."""

import heapq
import itertools
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from april.broker.ledger.segments import Segments


class SampleState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    PARTIAL = "partial"
    ACTING = "acting"
    """it is its agent's to speak"""
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


CLEANING_PUSHES = 1024
Order = tuple[int, ...]
"""of samples that wait"""
PLACE_WORDS = 3
"""of 64 bits that a sample keeps of a chunk; its `places` say what is in them"""
WORD, LOW, OBSERVED = 32, 0xFFFFFFFF, 1 << 31
"""two numbers to such a word, and the bit that an observation's tokens have"""


class Place(NamedTuple):
    """Where the journal has the tokens of a chunk or an observation."""

    record: int
    """position of its record"""
    offset: int
    """from there to its payload"""
    size: int
    """bytes of the payload"""
    checksum: int
    tokens: int
    observed: bool


TO_GENERATE = (SampleState.WAITING, SampleState.PARTIAL)
UNFINISHED = (*TO_GENERATE, SampleState.LEASED, SampleState.ACTING)
ENDED = (SampleState.DONE, SampleState.DEAD)


@dataclass(slots=True, eq=False)
class Sample:
    """Slot `index` of its group. Its tokens stay in the journal; `chunks` says where."""

    group: "Group"
    index: int
    state: SampleState = SampleState.WAITING
    length: int = 0
    """acknowledged response tokens, observations included"""
    segments: Segments = field(default_factory=Segments)
    """of what the policy has sampled"""
    chunks: "array[int]" = field(default_factory=lambda: array("Q"))
    """where the journal has each of its chunks, in order, 24 bytes a chunk: see `places`"""
    lease_id: int = 0
    """of the current lease, 0 for none"""
    attempts: int = 0
    """leases that were lost or failed"""
    reward: float | None = None
    finish_reason: str = ""
    last_error: str = ""
    details: dict[str, float] | None = None
    """what its reward is made of"""
    home: str = ""
    """the worker that handed it back and has its prefix in cache until new weights come"""
    agent_lease: int = 0
    """of the session that its agent has with the policy, 0 for none"""
    left: bytes = b""
    """the state that its agent has left, until it is scored"""
    branches: "tuple[Sample, ...]" = ()
    """of its session, beside the one that it stands for itself: lines of conversation that did not follow its own"""
    trunk: "Sample | None" = None
    """the sample whose session it is a branch of, None of one that is no branch"""
    branch: int = 0
    """its number in the session; 0 is the one that the session began with"""
    parent: int = 0
    """the branch that it has left"""
    shared: int = 0
    """tokens at its beginning that are another branch's: read here, and trained there"""
    shared_step: int = 0
    """of the newest policy among them"""

    @property
    def session(self) -> "Sample":
        """The sample that leases, attempts and reward of its session belong to."""
        return self.trunk or self

    @property
    def lines(self) -> "tuple[Sample, ...]":
        """All branches of its session."""
        return (self, *self.branches)

    def line(self, branch: int) -> "Sample | None":
        """The branch of that number."""
        return next((line for line in self.lines if line.branch == branch), None)

    @property
    def last_step(self) -> int:
        """Of the policy that said the last of its tokens, shared ones included; 0 if none did."""
        return self.segments.last_step if self.segments else self.shared_step

    def cached_by(self, step: int) -> str:
        """The worker, at policy step `step`, that need not compute its prefix again; "" for none."""
        return self.home if self.state is SampleState.PARTIAL and self.last_step == step else ""

    @property
    def sampled(self) -> int:
        """Its tokens without observations, those of all its branches."""
        own = self.segments.tokens
        return own + sum(line.segments.tokens for line in self.branches) if self.branches else own

    @property
    def expected_length(self) -> int:
        """What it has, or what the longest of its siblings that have ended has if that is more."""
        longest = self.length
        for sibling in self.group.samples:
            if sibling.finish_reason and sibling.length > longest:
                longest = sibling.length
        return longest

    @property
    def observations(self) -> list[tuple[int, int]]:
        """(start, end) of what its environment has answered."""
        starts = [0, *(end for _, end, _ in self.segments)]
        ends = [*(start for start, _, _ in self.segments), self.length]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def turn_end(self, most: int) -> int:
        """Where the last of its own turns ends that are over by so many tokens; 0 without one."""
        ends = [start for start, _ in self.observations]
        if self.state is SampleState.ACTING:
            ends.append(self.length)
        return max((end for end in ends if end <= most), default=0)

    @property
    def heard(self) -> int:
        """Its length up to the end of the last turn that is over: what its agent has an answer to."""
        return self.turn_end(self.length)

    @property
    def last_line(self) -> "Sample":
        """The branch in which the policy has spoken last."""
        return max(self.lines, key=lambda line: line.chunks[-PLACE_WORDS:-1].tolist())

    def cut(self, length: int) -> int:
        """Forget what lies behind the end of a turn; returns how many sampled tokens that were."""
        before = self.segments.tokens
        behind = sum(place.tokens for place in self.places) - length
        for place in reversed(list(self.places)):
            if behind <= 0:
                break
            behind -= place.tokens
            del self.chunks[-PLACE_WORDS:]
        self.segments = Segments(segment for segment in self.segments if segment[1] <= length)
        self.length = length
        return before - self.segments.tokens

    @property
    def accuracy(self) -> float:
        """What its verifier calls `correct`, or else its reward before penalties."""
        details = self.details or {}
        unknown = math.nan if self.reward is None else self.reward
        return details.get("correct", details.get("base", unknown))

    @property
    def places(self) -> Iterator[Place]:
        """Where the journal has its chunks, observations among them."""
        words = np.frombuffer(self.chunks, np.uint64).reshape(-1, PLACE_WORDS)
        record, stretch, content = words.T
        tokens = content >> WORD
        columns = (record, stretch >> WORD, stretch & LOW, content & LOW, tokens & (OBSERVED - 1), tokens >= OBSERVED)
        return map(Place, *(column.tolist() for column in columns))

    @property
    def first_step(self) -> int:
        """A worker must be at this step or later to go on with it, so that versions never decrease."""
        opened_at = self.group.opened_at
        return max(opened_at, self.last_step) if self.length else opened_at


@dataclass(slots=True, eq=False, weakref_slot=True)
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
    """acknowledged response tokens of all samples, without observations"""
    step: int = -1
    """of its delivery"""
    together: bool = False
    """its samples are scored together, by one lease on all of them"""
    left: int = 0
    """samples that have not ended, while it is open"""

    def forget(self) -> None:
        """Part from its samples, which refer to it: the memory is free at once, without a garbage collection."""
        for sample in self.samples:
            sample.branches = ()
        self.samples.clear()

    @property
    def live_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.state is not SampleState.DEAD]

    @property
    def lines(self) -> Iterator[Sample]:
        """Its samples, each with the branches of its session behind it."""
        return (line for sample in self.samples for line in sample.lines)

    @property
    def awaits_scores(self) -> bool:
        """Every sample that lives is generated, so that they can be scored together."""
        return all(sample.state is SampleState.GENERATED for sample in self.live_samples)

    @property
    def unfinished(self) -> bool:
        """Some sample still has tokens to come."""
        return any(sample.state in UNFINISHED for sample in self.samples)


@dataclass(slots=True)
class Lease:
    id: int
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
    floor: int = 0
    """its next tokens are of this step or a later one"""
    agent: bool = False
    """an agents process has a session for it; workers have other leases on the same sample, one a turn"""
    advanced: bool = False
    """a turn has come to its end under it"""

    @property
    def generating(self) -> bool:
        return self.sample.state is SampleState.LEASED and not self.agent

    @property
    def samples(self) -> list[Sample]:
        """All that it is on: where a group is scored together, those that live; `sample` is the first of them."""
        group = self.sample.group
        return group.live_samples if self.scoring and group.together else [self.sample]

    @property
    def on_group(self) -> bool:
        return self.scoring and self.sample.group.together


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

    def take(self, step: int, below: Order | None = None) -> Sample | None:
        """The first that a worker at `step` may go on with; `below`: only if its key is."""
        first = None
        for first_step, heap in list(self._by_step.items()):
            if first_step <= step and self._has_head(first_step) and (first is None or heap[0] < first[0]):
                first = heap
        if first is None or (below is not None and first[0][0] >= below):
            return None
        return heapq.heappop(first)[-1]

    def _has_head(self, first_step: int) -> bool:
        """Drop what no longer waits at this step; whether anything is left."""
        heap = self._by_step[first_step]
        while heap and not _waits_from(heap[0][-1], first_step):
            heapq.heappop(heap)
        if not heap:
            del self._by_step[first_step]
        return bool(heap)


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
        self._evaluation, self._started, self._by_age, self._fresh = Waiting(), Waiting(), Waiting(), Waiting()
        self._without_agent: dict[bool, list[tuple[Order, int, Sample]]] = {False: [], True: []}
        self._arrivals = itertools.count()

    def push(self, sample: Sample) -> None:
        if sample.state is SampleState.GENERATED:
            if not sample.group.together or sample.group.awaits_scores:
                self._scoring.append(sample)
        elif sample.group.evaluation:
            self._evaluation.push(sample, (not sample.attempts, *_place(sample)))
        elif sample.group.started:
            age = _age(sample)
            self._started.push(sample, (not sample.attempts, *age))
            self._by_age.push(sample, age)
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
        return self._started.take(step)

    def take_due(self, step: int, opened_by: int) -> Sample | None:
        """Of a group first leased at step `opened_by` or before."""
        return self._by_age.take(step, below=(opened_by + 1,))

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


def lacks_agent(sample: Sample) -> bool:
    """Whether its agent has still to speak, and nobody runs it; that of a branch is its session's."""
    goes_on = sample.state in UNFINISHED and sample.group.state is GroupState.OPEN
    return goes_on and not sample.agent_lease and sample.trunk is None


def _waits_for_score(sample: Sample) -> bool:
    return sample.state is SampleState.GENERATED and sample.group.state is GroupState.OPEN


def _place(sample: Sample) -> Order:
    return sample.group.id, sample.index


def _age(sample: Sample) -> Order:
    untouched = sample.attempts == 0 and sample.length == 0
    return sample.group.opened_at, untouched, -sample.expected_length, *_place(sample)
