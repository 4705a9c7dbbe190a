"""Groups, samples and leases: the plain data of the ledger."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from april.broker.ledger.chunk_refs import ChunkRef, Segment, add_chunk_ref, chunk_refs_in, segments_in

PlacedImage = tuple[str, int]
"""(name, offset) of an image that an agent has sent; its placeholder tokens are the first ones in the response from the
token offset on."""


class SampleState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    PARTIAL = "partial"
    ACTING = "acting"
    """The agent acts next: no worker generates until the agent reports an observation."""
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
NOT_EVALUATED = "not_evaluated"
"""Discard reason of a held-out group that could not be generated under the version of its evaluation."""


class NoAgentDefaults:
    """Values that the fields of `AgentSample` have in samples without an agent: class attributes, so that they take no
    memory per sample."""

    __slots__ = ()
    agent_lease: int = 0
    agent_state: bytes = b""
    forks: "tuple[Sample, ...]" = ()
    main_sample: "Sample | None" = None
    fork_number: int = 0
    parent_fork: int = 0
    shared_tokens: int = 0
    images: "tuple[PlacedImage, ...]" = ()


@dataclass(slots=True, eq=False)
class Sample(NoAgentDefaults):
    """Response number `index` of its group. The tokens stay in the journal; `chunks` holds references to them."""

    group: "Group"
    index: int
    state: SampleState = SampleState.WAITING
    length: int = 0
    """Acknowledged response tokens, observations included."""
    chunks: bytes = b""
    """Packed references to the sample's chunks in the journal, in order; `chunk_refs` unpacks them."""
    unsampled: int = 0
    """Number of tokens not sampled in this fork: observations, and tokens shared with another fork."""
    last_step: int = 0
    """Policy step of the weights that sampled the latest token, shared tokens included."""
    lease_id: int = 0
    """Id of the current lease of a worker or scorer; 0 for none."""
    attempts: int = 0
    """Number of the sample's leases that were lost or failed."""
    reward: float | None = None
    finish_reason: str = ""
    last_error: str = ""
    details: dict[str, float] | None = None
    """Named parts of the reward, as the verifier reports them; None while unscored."""
    cache_worker: str = ""
    """Uid of the worker that handed the sample back and keeps its prefix in the KV cache until new weights arrive."""

    @property
    def session_sample(self) -> "Sample":
        """The main sample of the session that this sample belongs to: it carries the attempts and the reward of all
        forks."""
        return self.main_sample or self

    @property
    def with_forks(self) -> "tuple[Sample, ...]":
        """The sample itself and, if it is the main sample of a session, all forks of the session."""
        return (self, *self.forks)

    def find_fork(self, number: int) -> "Sample | None":
        """The sample with this fork number in the session; None if there is none."""
        if number == self.fork_number:
            return self
        return next((fork for fork in self.forks if fork.fork_number == number), None)

    @property
    def session_started(self) -> bool:
        """Whether the journal has any request of the sample's agent, so that running the agent again would repeat
        it."""
        return bool(self.length or self.forks)

    @property
    def segments(self) -> list[Segment]:
        """Token spans that the policy sampled, each with its policy version; shared tokens are excluded."""
        return segments_in(self.chunks)

    @property
    def sampled_from(self) -> int:
        """Token offset at which the first sampled span starts, after shared tokens and observations; 0 without one."""
        return min((start for start, _, _ in self.segments), default=0)

    @property
    def sampled_until(self) -> int:
        """Token offset at which the last sampled span ends; 0 without one."""
        return max((end for _, end, _ in self.segments), default=0)

    def cached_by(self, step: int) -> str:
        """Uid of the worker that keeps the sample's prefix in its KV cache, if the prefix was sampled last with weights
        of policy step `step`, so that the cache is valid for them; "" for none."""
        return self.cache_worker if self.state is SampleState.PARTIAL and self.last_step == step else ""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled, in this sample and all its forks."""
        return sum(fork.own_sampled_tokens for fork in self.with_forks) if self.forks else self.own_sampled_tokens

    @property
    def own_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled in this fork alone."""
        return self.length - self.unsampled

    @property
    def expected_length(self) -> int:
        """Predicted response length in tokens: the larger of the current length and that of the longest finished
        sibling."""
        longest = self.length
        for sibling in self.group.samples:
            if sibling.finish_reason and sibling.length > longest:
                longest = sibling.length
        return longest

    @property
    def observations(self) -> list[tuple[int, int]]:
        """(start, end) token offsets of the spans that the policy did not sample in this fork."""
        segments = self.segments
        starts = [0, *(end for _, end, _ in segments)]
        ends = [*(start for start, _, _ in segments), self.length]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    @property
    def turns(self) -> int:
        """Number of turns of the policy: spans that it sampled without an observation in between."""
        observations = self.observations
        return len(observations) + (not observations or observations[-1][1] < self.length)

    def last_turn_end(self, limit: int) -> int:
        """End of the last complete turn that ends at or before token `limit`; 0 without one."""
        ends = [start for start, _ in self.observations]
        if self.state is SampleState.ACTING:
            ends.append(self.length)
        return max((end for end in ends if end <= limit), default=0)

    @property
    def complete_turns_length(self) -> int:
        """Length in tokens up to the end of the last complete turn: the last answer that the agent can have."""
        return self.last_turn_end(self.length)

    @property
    def sampled_forks(self) -> "list[Sample]":
        """The sample itself, or of a session with forks each fork in which the policy has sampled tokens."""
        return [fork for fork in self.with_forks if fork.own_sampled_tokens or not self.forks]

    @property
    def latest_fork(self) -> "Sample":
        """The sample itself or one of its forks: the one that got tokens last."""
        return max(self.with_forks, key=lambda fork: list(fork.chunk_refs)[-1:])

    def cut(self, length: int) -> int:
        """Drop all tokens after offset `length`, the end of a turn; returns the number of sampled tokens dropped."""
        before, refs = self.own_sampled_tokens, self.chunk_refs
        if self.images:
            as_agent_sample(self).images = images_before(self.images, length)
        self.chunks, self.length, self.unsampled, self.last_step = b"", 0, 0, 0
        for ref in refs:
            if self.length < length:
                self.extend(ref)
        return before - self.own_sampled_tokens

    def extend(self, ref: ChunkRef) -> None:
        """Append a chunk or an observation."""
        self.chunks = add_chunk_ref(self.chunks, *ref)
        self.length += ref.tokens
        if ref.observed:
            self.unsampled += ref.tokens
        self.last_step = max(self.last_step, ref.step)

    @property
    def accuracy(self) -> float:
        """Accuracy of the sample: the detail `correct` of its verifier or, without one, the reward before penalties;
        NaN while unscored."""
        return (self.details or {}).get("correct", self.base_reward)

    @property
    def base_reward(self) -> float:
        """The reward before penalties; NaN while unscored."""
        unknown = math.nan if self.reward is None else self.reward
        return (self.details or {}).get("base", unknown)

    @property
    def is_correct_known(self) -> bool:
        """Whether the score says if the response was correct. It does for a response that exceeded its verifier's
        limits, which counts as wrong."""
        details = self.details or {}
        return "correct" in details or bool(details.get("over_limit"))

    @property
    def chunk_refs(self) -> Iterator[ChunkRef]:
        """References to the sample's chunks and observations in the journal, in order."""
        return chunk_refs_in(self.chunks)

    @property
    def first_step(self) -> int:
        """Least policy step of a worker that may continue the response, so that versions within it never decrease."""
        opened_at = self.group.opened_at
        return max(opened_at, self.last_step) if self.length else opened_at


@dataclass(slots=True, eq=False)
class AgentSample(Sample):
    """A session between an agent and the policy, or a fork of one.

    A fork is a further sample of its group with a parent fork and an offset, `shared_tokens`. The session's main sample
    has fork number 0 and carries lease, attempts and reward of the session.
    """

    agent_lease: int = 0
    """Id of the lease of the agents process that runs the session; 0 for none."""
    agent_state: bytes = b""
    """State that the agent left for the verifier, kept until the sample is scored."""
    forks: "tuple[Sample, ...]" = ()
    """The session's further forks, in the main sample only."""
    main_sample: "Sample | None" = None
    """The main sample of the session this is a fork of; None in a main sample."""
    fork_number: int = 0
    """Number of the fork in its session; 0 for the main sample."""
    parent_fork: int = 0
    """Number of the fork that this fork starts from."""
    shared_tokens: int = 0
    """Number of leading tokens shared with the parent fork: context in this fork, trained in the parent."""
    images: "tuple[PlacedImage, ...]" = ()
    """Images that the agent has sent, in order, those in the shared tokens included."""


def as_agent_sample(sample: Sample) -> AgentSample:
    """The same sample with the type `AgentSample`, which all samples have in a run with agents."""
    assert isinstance(sample, AgentSample)
    return sample


@dataclass(slots=True, eq=False, weakref_slot=True)
class Group:
    """The samples of a prompt that has been drawn once. If the prompt is drawn again, that is another group."""

    id: int
    ordinal: int
    """Number of the group among the training groups, in order of creation; -1 for evaluation."""
    evaluation: bool
    epoch: int
    row: int
    opened_at: int
    """Policy step of the worker's weights at the first lease of the group (v0 in `StalenessBound`); before that lease,
    a lower bound of it."""
    prompt: Any
    """Reference to the journal record of its prompt: (position, length) in bytes."""
    prompt_tokens: int
    samples: list[Sample] = field(default_factory=list)
    state: GroupState = GroupState.OPEN
    started: bool = False
    tokens: int = 0
    """Acknowledged response tokens of all samples, without observations."""
    step: int = -1
    """Policy step of the batch that contains the group; -1 before delivery."""
    group_scored: bool = False
    """Whether one lease scores all samples of the group together."""
    token_scores: dict[int, tuple[int, int, int, list[str]]] | None = None
    """Where the token scores and the feedback of each sample are, by index of the sample: (position, length) of the
    journal record, index of the sample's response in that record (of a session: of its first fork with sampled tokens),
    and names of the scores. None if no sample has any."""
    images: Sequence[str] = ()
    """Names of the prompt's images, in order."""
    number: int = -1
    """Number of the dataset row, where a sampler chooses the prompts; otherwise -1."""
    pending_samples: int = 0
    """Number of samples that are neither done nor dead, while the group is open."""

    def forget(self) -> None:
        """Break the reference cycle between the group and its samples, so that memory is freed without a garbage
        collection."""
        for sample in self.samples:
            if isinstance(sample, AgentSample):
                sample.forks = ()
        self.samples.clear()

    def place_token_scores(self, samples: list[Sample], record: tuple[int, int], columns: list[dict[str, int]]) -> None:
        """Note that the token scores of `samples` are in the journal record `record`, given by (position, length).
        `columns`: see `events.TokensScored`."""
        firsts = accumulate((len(sample.sampled_forks) for sample in samples), initial=0)
        placed = zip(samples, firsts, strict=False)
        scored = {sample.index: (*record, first, sorted(columns[first])) for sample, first in placed}
        self.token_scores = {**(self.token_scores or {}), **scored}

    @property
    def live_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.state is not SampleState.DEAD]

    @property
    def samples_with_forks(self) -> Iterator[Sample]:
        """Every sample, each followed by the forks of its session."""
        return (fork for sample in self.samples for fork in sample.with_forks)

    @property
    def awaits_scores(self) -> bool:
        """Whether every live sample is generated, so that the group can be scored."""
        return all(sample.state is SampleState.GENERATED for sample in self.live_samples)

    @property
    def unfinished(self) -> bool:
        """Whether some sample of the group has to be generated further."""
        return any(sample.state in UNFINISHED for sample in self.samples)


@dataclass(slots=True)
class Lease:
    """The right of one worker, scorer or agents process to work on a sample until the lease expires."""

    id: int
    sample: Sample
    worker: str
    """Uid of the holder."""
    step: int
    """Policy step of the holder's weights at the grant."""
    scoring: bool
    """Whether the lease was granted for scoring only."""
    expires_at: float
    """Time at which the lease expires, seconds on the caller's clock; renewals postpone it."""
    ends_at: float = float("inf")
    """Latest time to which renewals can extend the lease, seconds on the same clock."""
    floor: int = 0
    """Least policy step of the weights that may sample the next tokens under this lease: versions never decrease."""
    agent: bool = False
    """Whether an agents process holds the lease to run the session; workers get a separate lease for each turn."""
    turn_completed: bool = False
    """Whether a turn of the session has ended under this lease."""

    @property
    def generating(self) -> bool:
        return self.sample.state is SampleState.LEASED and not self.agent

    @property
    def samples(self) -> list[Sample]:
        """The samples that the lease covers: all live samples of a group that is scored as a whole, otherwise just
        `sample`."""
        return self.sample.group.live_samples if self.scoring and self.for_group else [self.sample]

    @property
    def for_group(self) -> bool:
        return self.scoring and self.sample.group.group_scored


def images_before(images: Iterable[PlacedImage], length: int) -> tuple[PlacedImage, ...]:
    """The images of a response whose offsets are before `length`, the end of a turn in tokens."""
    return tuple(image for image in images if image[1] < length)


def needs_agent(sample: Sample) -> bool:
    """Whether a sample is the main sample of an unfinished session that no agents process runs."""
    is_open = sample.state in UNFINISHED and sample.group.state is GroupState.OPEN
    return is_open and not sample.agent_lease and sample.main_sample is None
