"""Groups, samples and leases: the plain data of the ledger."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from april.broker.ledger.places import Place, Segment, add_place, places_in, segments_in


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


TO_GENERATE = (SampleState.WAITING, SampleState.PARTIAL)
UNFINISHED = (*TO_GENERATE, SampleState.LEASED, SampleState.ACTING)
ENDED = (SampleState.DONE, SampleState.DEAD)


class WithoutAgent:
    """What is so of every sample that no agent speaks for, and need not be kept with each: see `AgentSample`."""

    __slots__ = ()
    agent_lease: int = 0
    left: bytes = b""
    branches: "tuple[Sample, ...]" = ()
    trunk: "Sample | None" = None
    branch: int = 0
    parent: int = 0
    shared: int = 0


@dataclass(slots=True, eq=False)
class Sample(WithoutAgent):
    """Slot `index` of its group. Its tokens stay in the journal; `chunks` says where."""

    group: "Group"
    index: int
    state: SampleState = SampleState.WAITING
    length: int = 0
    """acknowledged response tokens, observations included"""
    chunks: bytes = b""
    """where the journal has each of its chunks, in order: see `places`"""
    unsampled: int = 0
    """tokens that are observations, or another branch's"""
    last_step: int = 0
    """of the policy that said the last of its tokens, shared ones included"""
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
        return self if branch == self.branch else next((line for line in self.branches if line.branch == branch), None)

    @property
    def was_spoken_in(self) -> bool:
        """Whether an agent has asked anything that is on disk."""
        return bool(self.length or self.branches)

    @property
    def segments(self) -> list[Segment]:
        """Of what the policy has sampled."""
        return segments_in(self.chunks)

    @property
    def sampled_until(self) -> int:
        """Where the last of that ends, 0 without any."""
        return max((end for _, end, _ in self.segments), default=0)

    def cached_by(self, step: int) -> str:
        """The worker, at policy step `step`, that need not compute its prefix again; "" for none."""
        return self.home if self.state is SampleState.PARTIAL and self.last_step == step else ""

    @property
    def sampled(self) -> int:
        """Its tokens without observations, those of all its branches."""
        return sum(line.own for line in self.lines) if self.branches else self.own

    @property
    def own(self) -> int:
        """Tokens that the policy has sampled in this branch."""
        return self.length - self.unsampled

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
        segments = self.segments
        starts = [0, *(end for _, end, _ in segments)]
        ends = [*(start for start, _, _ in segments), self.length]
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
        return max(self.lines, key=lambda line: list(line.places)[-1:])

    def cut(self, length: int) -> int:
        """Forget what lies behind the end of a turn; returns how many sampled tokens that were."""
        before, places = self.own, self.places
        self.chunks, self.length, self.unsampled, self.last_step = b"", 0, 0, 0
        for place in places:
            if self.length < length:
                self.extend(place)
        return before - self.own

    def extend(self, place: Place) -> None:
        """These tokens follow."""
        self.chunks = add_place(self.chunks, *place)
        self.length += place.tokens
        if place.observed:
            self.unsampled += place.tokens
        self.last_step = max(self.last_step, place.step)

    @property
    def accuracy(self) -> float:
        """What its verifier calls `correct`, or else its reward before penalties."""
        details = self.details or {}
        unknown = math.nan if self.reward is None else self.reward
        return details.get("correct", details.get("base", unknown))

    @property
    def places(self) -> Iterator[Place]:
        """Where the journal has its chunks, observations among them."""
        return places_in(self.chunks)

    @property
    def first_step(self) -> int:
        """A worker must be at this step or later to go on with it, so that versions never decrease."""
        opened_at = self.group.opened_at
        return max(opened_at, self.last_step) if self.length else opened_at


@dataclass(slots=True, eq=False)
class AgentSample(Sample):
    """A session that an agent has with the policy, or a branch of one."""

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


def of_agent(sample: Sample) -> AgentSample:
    """The same sample, in a run of agents."""
    assert isinstance(sample, AgentSample)
    return sample


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
            if isinstance(sample, AgentSample):
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
        return self.sample.group.live_samples if self.scoring and self.on_group else [self.sample]

    @property
    def on_group(self) -> bool:
        return self.scoring and self.sample.group.together


def lacks_agent(sample: Sample) -> bool:
    """Whether its agent has still to speak, and nobody runs it; that of a branch is its session's."""
    goes_on = sample.state in UNFINISHED and sample.group.state is GroupState.OPEN
    return goes_on and not sample.agent_lease and sample.trunk is None
