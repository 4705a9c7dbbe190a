"""Messages between the broker and the learner."""

from typing import Annotated, Literal

import msgspec

from april.wire.message import Message, Name, Number, Version

TOKEN_ARRAYS = ("i4", "f4", "i4", "i4")
"""Dtypes of a sample's arrays: token ids [T], behaviour log-probabilities [T] and, in a run that truncates the sampling
distribution, support sizes [T] and the concatenated support ids."""
ENGINE_GAP_PREFIX = "engine_gap_"
"""Prefix of metrics in `Consumed` about the gap between a worker's and the learner's log-probabilities:
engine_gap_FIGURE_WORKER."""
Discard = Literal["", "nonfinite"]
"""Reason for which the learner skipped a batch; "" if it trained the batch."""


class StartLearner(Message):
    """Request of a starting learner that holds checkpoint `step`. The checkpoint contains all batches before `step`;
    later batches are delivered, if necessary again."""

    step: Number
    weights_address: Name


class LearnerAdmitted(Message):
    """Answer to `StartLearner`: the learner may fetch batches as a new incarnation."""

    incarnation: int
    """Incarnation of the versions that this learner will produce."""
    frontier: int
    """Largest number of batches that any learner of the run has consumed; weights of earlier steps are not published
    again."""


class Rendezvous(Message):
    """Rendezvous of the ranks of a learner on several machines. Each machine sends it periodically, and the broker
    answers with the same message."""

    address: Name = ""
    """HOST:PORT of the store in which the ranks find each other. The learner's first machine sends it; the others send
    "". In the broker's answer it is "" while unknown."""
    start: Number = 0
    """Number of a start of the learner. From a machine: the last start that its process has joined, 0 before the first.
    From the broker: the newest start; a machine that has joined an earlier one ends its ranks and joins this one."""


class WeightsAddress(Message):
    """Tells workers where to reach the weight publisher of a learner that has just started."""

    address: str
    key: str = ""
    """CURVE public key of the publisher; "" without CURVE."""


Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
"""Text of 64 hexadecimal digits: a SHA-256."""


class WeightFolder(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot of one version of the weights, which the learner has written below `weights.folder`."""

    version: Version
    digest: Sha256
    """SHA-256 of the folder's list of checksums, with which readers of the folder verify every file."""


class WeightsWritten(Message):
    """The learner has written a snapshot of a version, which workers may read from now on."""

    folder: WeightFolder


class WeightFolders(Message):
    """Tells workers which snapshots of weights there are, the newest first."""

    folders: list[WeightFolder]


class Submission(msgspec.Struct, array_like=True, frozen=True):
    """A prompt that the trainer submits."""

    prompt_tokens: Number
    label: str
    reward: Name = ""
    """Name of the prompt's verifier; "" for the run's default verifier."""
    extra: bytes = b""
    """Opaque bytes that are returned with the group."""
    images: list[Name] = []
    """Names of the prompt's images, in the order of their placeholders; the broker has kept them (`KeepImage`)."""


class Submit(Message):
    """Prompts in submission order; `first` is the number of the first one. One int32 array: their token ids,
    concatenated."""

    first: Number
    prompts: list[Submission]


class Submitted(Message):
    """Answer to `Submit`: `count` prompts of the run have been submitted and journaled so far."""

    count: int


class Fetch(Message):
    """The learner's request for batch number `step`, counted from 0."""

    step: Number
    samples: bool = False
    """Whether the answer also has what the sample logs need: discarded groups (after those of the batch), reference
    answers, and the time of each chunk."""
    held_out: bool = False
    """Whether the answer also has groups of evaluations (held-out groups), for the sample logs."""


class SampleSpan(msgspec.Struct, array_like=True, frozen=True):
    """A period in which a worker, a scorer or an agents process held a sample."""

    activity: str
    """Activity of the holder: generate | score | act (it ran the sample's agent)."""
    holder: str
    """Name of the process that held the sample."""
    began: float
    ended: float
    """End of the span, Unix time in seconds; `began` is its beginning."""
    start: int
    end: int
    """Response length in tokens at the end of the span; `start` is that at its beginning."""
    outcome: str
    """How the span ended: stop | length (the response is complete) | scored | closed (by the sample's agent) | void
    (its group was ended) | the cause for which the lease ended, such as recall."""


class SampleHead(msgspec.Struct, array_like=True, frozen=True):
    """A sample of a delivered group, without its token arrays."""

    index: int
    response_tokens: int
    reward: float
    finish_reason: str
    segments: list[tuple[int, int, Version]]
    """(start, end, version): the response's tokens from `start` to `end` - 1 were sampled under that version. Other
    tokens of the response are observations."""
    details: dict[Name, float] = {}
    """Named components of the reward."""
    spans: list[SampleSpan] = []
    fork: int = 0
    """Number of the fork in its agent session; 0 for the main sample. Forks of a session follow each other, each with
    its reward."""
    chunks: list[tuple[int, float]] = []
    """For a sample in the sample logs, per chunk: (response tokens so far, Unix time by the holder's clock)."""
    attempts: int = 0
    """For a discarded sample: how many leases on it ended in a loss or a failure."""
    error: str = ""
    """For a discarded sample: error of its last failed attempt."""
    discarded_from: int = 0
    """For a discarded sample: offset in its response from which tokens were discarded; 0 if all of them were."""
    parent: int = 0
    """For a fork: number of the fork in the same session from which it branches off."""
    shared_tokens: int = 0
    """For a fork: number of tokens at its beginning that are also the first tokens of its `parent`."""
    shown_images: list[tuple[Name, Number]] = []
    """For each image in the response, in order: (name, offset in the response from which its placeholder tokens are
    looked for). The prompt's images come before these."""
    feedback: str = ""
    """Text that the verifier gave beside the reward."""
    hinted: bytes = b""
    """For self-distillation on this sample: token ids, little-endian int32, of the prompt with the sample's own hint;
    b"" if the group's `hinted` prompt is used."""


class GroupHead(msgspec.Struct, array_like=True, frozen=True):
    """A delivered group, without its token arrays."""

    group: int
    prompt_tokens: int
    samples: list[SampleHead]
    opened_at: float = 0.0
    delivered_at: float = 0.0
    """Time of the delivery, or for discarded samples of the discard, Unix time in seconds."""
    prompt_number: int = -1
    """Number of the submitted prompt; -1 if the prompt comes from the dataset."""
    extra: bytes = b""
    """Opaque bytes that the trainer submitted with the prompt (`Submission.extra`)."""
    discarded: str = ""
    """Reason for which these samples were discarded, so that they are not part of the batch; "" for others. In a group
    that is not trained an unknown reward is nan."""
    held_out: str = ""
    """Name of the evaluation set of a held-out prompt, whose samples are not part of the batch; "" for others."""
    label: str = ""
    """The prompt's reference answer, for a group in the sample logs."""
    images: list[str] = []
    """Names of the prompt's images, in order; `FetchImages` gets them."""
    hinted: bytes = b""
    """For self-distillation: token ids, little-endian int32, of the prompt with its hint (`algorithm.hint`). b"" if
    there is no hint, or each sample of the group has its own (`SampleHead.hinted`)."""
    source: Number = 0
    """Number of the prompt's source, its place in `data.sources`; 0 where there is one source, or the trainer submits
    prompts."""

    @property
    def is_trained(self) -> bool:
        return not (self.discarded or self.held_out)


class Batch(Message):
    """One part of the answer to `Fetch`: the groups from `first` on, of `total` groups. Those that are not trained come
    last: discarded and held-out ones.

    Arrays per group: the prompt (int32), then `TOKEN_ARRAYS` of each sample; all samples have supports, or none. After
    those of a sample comes a float32 array for each name in `token_scores`, empty if the sample has no such score.
    A batch without groups means that the trainer has to submit more prompts first.
    """

    step: int
    first: int
    total: int
    groups: list[GroupHead]
    token_scores: list[Name] = []
    """Names of the token scores that samples of this message have."""


class Finished(Message):
    """Answer to `Fetch` once the run is over. Arrays per group as in `Batch`."""

    reason: str
    groups: list[GroupHead] = []
    """Of the groups that `Fetch` asks for: held-out groups evaluated since the last batch and, if the run has failed,
    groups discarded since then."""


class Consumed(Message):
    """The learner has finished with batch `step`: it has trained the batch, or skipped it for the reason
    `discarded`."""

    step: Number
    metrics: dict[Name, float]
    discarded: Discard = ""


class Durable(Message):
    """Checkpoint `step` is on disk, and `oldest` is the oldest checkpoint that the learner keeps."""

    step: Number
    oldest: Number


class BestRequest(Message):
    """Asks which checkpoints must be kept according to `evaluation.best`."""


class BestCheckpoint(Message):
    """Answer to `BestRequest`. `step`: of the weights with the best evaluation so far, -1 if there are none;
    `undecided`: steps of weights whose evaluation is not complete yet. The checkpoints of all these steps must be
    kept."""

    step: int
    undecided: list[int]


class Accepted(Message):
    """Answer that only confirms a message: the broker has done what the message asks for."""
