"""Messages between the broker and the learner."""

from typing import Literal

import msgspec

from april.wire.message import Message, Name, Number, Version

TOKEN_ARRAYS = ("i4", "f4", "i4", "i4")
"""Dtypes of a sample's arrays: token ids [T] and behaviour log-probabilities [T]; in a run that cuts the distribution
also the number of ids in each token's support [T], and those ids."""
Discard = Literal["", "nonfinite"]
"""Why the learner skipped a batch; "" if it was trained."""


class StartLearner(Message):
    """The learner holds checkpoint `step`, which contains the batches below `step`; it needs all later ones (again)."""

    step: Number
    weights_address: Name


class LearnerAdmitted(Message):
    """Answer to `StartLearner`."""

    incarnation: int
    """First part of the versions that this learner makes."""
    frontier: int
    """Most batches that any learner of the run has consumed; weights of earlier steps are not published."""


class Rendezvous(Message):
    """The address (HOST:PORT) where the learner's ranks meet. The learner's first machine sends it; the others ask with
    "". The answer is the same message, with "" while the address is unknown."""

    address: Name = ""


class WeightsAddress(Message):
    """Where workers reach the publisher of a learner that has just started."""

    address: str
    key: str = ""
    """CURVE public key of the publisher; "" without CURVE."""


class Submission(msgspec.Struct, array_like=True, frozen=True):
    """A prompt that the trainer submits."""

    prompt_tokens: Number
    label: str
    reward: Name = ""
    """Name of the prompt's verifier; "" for the run's."""
    extra: bytes = b""
    """Opaque bytes that come back with the group."""


class Submit(Message):
    """Prompts in submission order; `first` is the number of the first one. One int32 array: their token ids,
    concatenated."""

    first: Number
    prompts: list[Submission]


class Submitted(Message):
    """Answer to `Submit`: `count` prompts of the run have been submitted and journaled so far."""

    count: int


class Fetch(Message):
    """Asks for batch `step`."""

    step: Number
    samples: bool = False
    """Also send what is kept for people to read: discarded groups after the batch's, and the time of each chunk."""


class SampleSpan(msgspec.Struct, array_like=True, frozen=True):
    """A period in which a worker, a scorer or an agents process held a sample."""

    activity: str
    """generate | score | act (its agent ran)"""
    holder: str
    """Name of the process."""
    began: float
    ended: float
    """Unix time, seconds."""
    start: int
    end: int
    """Response length in tokens when the span ended; `start`: when it began."""
    outcome: str
    """How the span ended: stop | length | scored | closed | void | the cause of the lease's end."""


class SampleHead(msgspec.Struct, array_like=True, frozen=True):
    """A sample of a delivered group, without its token arrays."""

    index: int
    response_tokens: int
    reward: float
    finish_reason: str
    segments: list[tuple[int, int, Version]]
    """(start, end, version): response tokens start to end - 1 were sampled under the version."""
    details: dict[Name, float] = {}
    """Named components of the reward."""
    spans: list[SampleSpan] = []
    fork: int = 0
    """Number of the fork of an agent session. The forks of a session follow each other, each with its reward."""
    chunks: list[tuple[int, float]] = []
    """For a sample that is kept for people to read, per chunk: (response tokens so far, Unix time by the holder's
    clock)."""
    attempts: int = 0
    """For a discarded sample: how many of its leases were lost or failed."""
    error: str = ""
    """Error of the last failed attempt."""
    discarded_from: int = 0
    """For a discarded sample: tokens before this offset are not discarded."""
    parent: int = 0
    """Number of the fork that this fork leaves."""
    shared_tokens: int = 0
    """How many tokens at the beginning of a fork belong to its parent."""


class GroupHead(msgspec.Struct, array_like=True, frozen=True):
    """A delivered group, without its token arrays."""

    group: int
    prompt_tokens: int
    samples: list[SampleHead]
    opened_at: float = 0.0
    delivered_at: float = 0.0
    """Unix time, seconds; for discarded samples, when they were discarded."""
    prompt_number: int = -1
    """Number of the submitted prompt; -1 if the prompt comes from the data."""
    extra: bytes = b""
    """`Submission.extra` of the prompt."""
    discarded: str = ""
    """Why these samples are not part of the batch; "" for groups to train. An unknown reward is then nan."""


class Batch(Message):
    """One part of the answer to `Fetch`: the groups from `first` on, of `total` groups. Discarded groups come last.

    Arrays per group: the prompt (int32), then `TOKEN_ARRAYS` of each sample; all samples have supports, or none.
    A batch without groups means that the trainer has to submit more prompts first.
    """

    step: int
    first: int
    total: int
    groups: list[GroupHead]


class Finished(Message):
    """Answer to `Fetch` once the run is over. Arrays per group as in `Batch`."""

    reason: str
    groups: list[GroupHead] = []
    """Groups discarded since the last batch, if the run has failed and `Fetch.samples` is set."""


class Consumed(Message):
    """The learner is done with batch `step`: it is in the weights, or was skipped for the reason `discarded`."""

    step: Number
    metrics: dict[Name, float]
    discarded: Discard = ""


class Durable(Message):
    """Checkpoint `step` is on disk; `oldest` is the oldest checkpoint that is kept."""

    step: Number
    oldest: Number


class BestRequest(Message):
    """Asks which checkpoints must be kept according to `evaluation.best`."""


class BestCheckpoint(Message):
    """The most accurate weights known are those of `step` (-1: none); those of the steps `undecided` are still being
    evaluated."""

    step: int
    undecided: list[int]


class Accepted(Message):
    """Answer to a message that only needs a confirmation."""
