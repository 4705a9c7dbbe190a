"""The events of the ledger, as the journal stores them: applying them in order to an empty ledger rebuilds it.

Token ids and log-probabilities are not fields of an event; they are arrays in the same record.
"""

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, dataclass_transform

import msgspec

from april.wire.rows import ROW, ReportRow, read_rows

Said = tuple[float, dict[str, float]]
"""(reward, details) that an agent reports for its own session."""
EventArray = tuple[int, bytes | memoryview]
"""(crc32, data) of an array in an event's record."""


@dataclass_transform(frozen_default=True)
class Event(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One journalled event; the class name is its tag on disk."""

    @property
    def weight(self) -> int:
        """Cost of replaying the event at a restart, compared with that of other events: 1, or the number of rows of an
        event with a table."""
        return 1


class RunStarted(Event):
    """First record of a run: the settings that a restart must find unchanged. The schedule's kind may change."""

    run: str
    dataset: str
    seed: int
    batch_groups: int
    group_size: int
    max_staleness: int
    max_attempts: int
    min_group_size: int | None
    max_response_tokens: int
    support: bool = False
    """Whether each training token comes with its support, because sampling truncates the distribution."""
    temperature: float = 1.0
    """Sampling temperature of the stored log-probabilities."""
    fingerprints: dict[str, str] = {}
    """Fingerprints of the contents that configuration keys refer to, by key."""


class BrokerStarted(Event):
    """The broker has started; `start` counts its starts in this run and is the upper half of every later lease id."""

    start: int


class GroupOpened(Event):
    """A prompt has been drawn and its group created; the prompt cursor moves past (epoch, row).

    For evaluation, `epoch` is the number of the prompt set and `floor` the policy step under evaluation. Array: the
    prompt's token ids, int32.
    """

    group: int
    evaluation: bool
    epoch: int
    row: int
    size: int
    """Number of samples in the group."""
    floor: int
    """Least policy step of a worker that starts the group."""
    prompt_tokens: int
    replaces: int | None = None
    """Id of the discarded group whose prompt is drawn again, without moving the prompt cursor; None for a fresh
    prompt."""
    group_scored: bool = False
    """Whether one lease scores all samples of the group, once all are generated."""
    images: list[str] = []
    """Names of the prompt's images, in order; their files are on disk."""
    number: int = -1
    """Number of the dataset row, if a sampler (`schedule.sampler`) chose the prompt; -1 otherwise. With a sampler the
    cursor counts the prompts drawn in the epoch, and `row` is the row's position in the epoch's order."""


class PromptSubmitted(Event):
    """The trainer has submitted prompt number `row`, counted from 0. Array: the prompt's token ids, int32."""

    row: int
    label: str
    reward: str
    """Name of the prompt's verifier; "" for the run's default verifier."""
    extra: bytes
    """Opaque bytes of the trainer, returned with the group."""
    images: list[str] = []
    """Names of the prompt's images, in order; their files are on disk."""


class Leased(Event):
    """A worker or scorer has been granted a lease on a sample.

    A scoring lease on a group that is scored as a whole covers all live samples; `index` is the first of them.
    """

    lease_id: int
    group: int
    index: int
    worker: str
    step: int
    scoring: bool
    fork_number: int = 0
    """Number of the fork in the sample's session; 0 for the main sample."""


class AgentLeased(Event):
    """An agents process has opened or reopened the session of a sample.

    The lease owns a range of ids, one for each fork the session can have, from `lease_id` on.
    """

    lease_id: int
    group: int
    index: int
    holder: str


class AgentClosed(Event):
    """The agent has finished. The sample now waits for its score; if the agent has set the reward, for a teacher's
    token scores only."""

    lease_id: int
    superseded: list[tuple[int, int]] = []
    """(fork number, length): tokens of that fork after `length` were received only by an earlier execution of the
    agent, and are discarded."""
    state: bytes = b""
    """State that the agent leaves for the verifier."""
    said: Said | None = None
    """Reward and details that the agent has reported, which are final; None leaves the reward to the verifier."""


class RowsAccepted(Event):
    """New tokens of many samples: chunks of the policy, and observations of environments or agents.

    A row whose id belongs to no existing fork of its session begins that fork. Array: the payloads of the rows,
    concatenated.
    """

    table: bytes
    """Rows of 48 bytes each, as in a worker's report."""
    payload_bytes: int
    images: list[tuple[int, list[str]]] = []
    """(lease id, names of the images in order) of each agent's observation that has some; their files are on disk. A
    record has at most one observation of a fork."""

    @property
    def rows(self) -> Iterator[ReportRow]:
        return read_rows(self.table)

    @property
    def weight(self) -> int:
        return len(self.table) // ROW.size


class SessionLost(Event):
    """The agent of a sample has stopped and must not be run again: the sample is dead."""

    group: int
    index: int


class SampleScored(Event):
    """A sample has its score, and the lease `lease_id` ends."""

    lease_id: int
    reward: float
    details: dict[str, float] = {}
    superseded: list[tuple[int, int]] = []
    """(fork number, length): tokens of that fork after `length` were received only by an earlier execution of the
    agent, and are discarded."""


class TokensScored(Event):
    """The responses of a lease have token scores or feedback; the score that ends the lease follows. Array: the values,
    float32."""

    lease_id: int
    columns: list[dict[str, int]]
    """For each response of the lease (in a session: for each fork in which the policy has sampled tokens), in order:
    the number of values of each token score, by its name. The event's array has the values in this order."""
    feedback: list[str] = []
    """For each response, the text that its verifier gave beside the reward, or ""; empty if no response has any."""


class GroupScored(Event):
    """A group that is scored as a whole has its rewards; the lease ends. One entry for each live sample, in order."""

    lease_id: int
    rewards: list[float]
    details: list[dict[str, float]]


class LeaseEnded(Event):
    """A lease has ended without finishing its sample, which waits again or is dead."""

    lease_id: int
    cause: str
    """Cause of the end. Given back: abort (the round has ended, or a drain has begun), recall (another worker is to go
    on), leave (the holder ends, or an agent's session is no longer needed, as the last batch is made). Otherwise: lost
    (the holder is gone), expired (not renewed, or held for longer than `broker.max_run_s`). A failed attempt:
    generation_failed | environment_failed | scoring_failed | agent_failed."""
    error: str = ""
    at: float = 0.0
    """Time at which the lease ended, Unix seconds; 0 if unknown."""


class GroupDiscarded(Event):
    """A group will not be trained."""

    group: int
    reason: str


class GroupRequeued(Event):
    """The prompt of a group that was discarded for a dead sample is to be drawn again, before fresh ones."""

    group: int


class EvaluationRecorded(Event):
    """The evaluation of policy step `step` is complete; the groups of the evaluation are no longer needed."""

    step: int
    result: dict[str, Any]
    """Result of the evaluation, in the form it has in summary.json."""


class EvaluationRestarted(Event):
    """The evaluation of policy step `step` begins again: the version of its first tokens, made by an earlier start of
    the learner, is gone. The groups of the evaluation are no longer needed."""

    step: int


class DrainStarted(Event):
    """A drain has started: no lease is granted, and workers have to hand back the training samples that they hold under
    lease ids up to `watermark`."""

    watermark: int


class DrainEnded(Event):
    pass


class RoundStarted(Event):
    round: int


class RoundEnded(Event):
    """A round has ended: workers have to hand back the training samples that they hold under lease ids up to
    `watermark`."""

    round: int
    watermark: int


class BatchDelivered(Event):
    """Batch `step` has been made of the groups with the ids `groups`."""

    step: int
    groups: list[int]


class BatchConsumed(Event):
    """The learner has finished with batch `step`: it has trained or skipped it."""

    step: int
    discarded: str = ""
    """`nonfinite` if the learner skipped the batch, as its loss or gradient was not finite; "" if it trained the
    batch."""


class StepRecorded(Event):
    """Batch `step` has its line in metrics.jsonl, with the learner's metrics. Array: the line, JSON in UTF-8."""

    step: int


class CheckpointDurable(Event):
    """Checkpoint `step` is on disk; no restart will use one older than `oldest`."""

    step: int
    oldest: int


class LearnerStarted(Event):
    """A learner starts from checkpoint `step` as a new incarnation; batches from `step` on will be delivered again."""

    incarnation: int
    step: int
    uid: str = ""
    """Uid of the learner process, by which a restarted broker recognises it."""
    weights_address: str = ""
    weights_key: str = ""


class WeightFolderWritten(Event):
    """The learner has written a snapshot of the weights of (incarnation, step), whose list of checksums has the SHA-256
    `digest`."""

    incarnation: int
    step: int
    digest: str


class TimePassed(Event):
    """The events after this one happened at `at` (Unix seconds) or shortly later."""

    at: float


EVENTS = Event.__subclasses__()
if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = reduce(or_, EVENTS)
