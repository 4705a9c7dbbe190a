"""The events of the ledger, as the journal stores them: applying them in order to an empty ledger rebuilds it.

Token ids and log-probabilities are not fields of an event; they are arrays in the same record.
"""

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, dataclass_transform

import msgspec

from april.wire.rows import ROW, ReportRow, read_rows

EventArray = tuple[int, bytes | memoryview]
"""(crc32, data) of an array in an event's record."""


@dataclass_transform(frozen_default=True)
class Event(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One journalled event; the class name is its tag on disk."""

    @property
    def weight(self) -> int:
        """Cost of replaying it at a restart, in events: a table counts as its rows."""
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
    """The broker has started; `start` counts the starts and is the upper half of every later lease id."""

    start: int


class GroupOpened(Event):
    """A prompt has been drawn and its group created; (epoch, row) moves the prompt cursor.

    For evaluation, `epoch` is the number of the prompt set and `floor` the policy step under evaluation. Array: the
    prompt's token ids, int32.
    """

    group: int
    evaluation: bool
    epoch: int
    row: int
    size: int
    """Samples in the group."""
    floor: int
    """Least policy step of a worker that starts the group."""
    prompt_tokens: int
    replaces: int | None = None
    """Discarded group whose prompt is drawn again; the cursor does not move then."""
    group_scored: bool = False
    """Whether one lease scores all samples of the group, once all are generated."""


class PromptSubmitted(Event):
    """The trainer has submitted prompt number `row`, counted from 0. Array: its token ids, int32."""

    row: int
    label: str
    reward: str
    """Name of its verifier; "" for the run's default."""
    extra: bytes
    """Opaque bytes of the trainer, returned with the group."""


class Leased(Event):
    """A worker or scorer has been given a sample.

    A scoring lease on a group that is scored as a whole covers all live samples; `index` is the first of them.
    """

    lease_id: int
    group: int
    index: int
    worker: str
    step: int
    scoring: bool
    fork_number: int = 0
    """Fork of the sample's session; 0 for the main sample."""


class AgentLeased(Event):
    """An agents process has opened or reopened the session of a sample.

    The lease owns a range of ids, one for each fork the session can have, from `lease_id` on.
    """

    lease_id: int
    group: int
    index: int
    holder: str


class AgentClosed(Event):
    """The agent has finished; the sample waits for its score."""

    lease_id: int
    superseded: list[tuple[int, int]] = []
    """(fork number, length): tokens of that fork after `length` are known only to an earlier execution of the agent."""
    state: bytes = b""
    """State that the agent leaves for the verifier."""


class RowsAccepted(Event):
    """New tokens of many samples: chunks of the policy, and observations of environments or agents.

    A row whose id belongs to no existing fork of its session begins that fork. Array: the payloads of the rows,
    concatenated.
    """

    table: bytes
    """Rows of 48 bytes each, as in a worker's report."""
    payload_bytes: int

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
    """A sample has its reward; its lease ends."""

    lease_id: int
    reward: float
    details: dict[str, float] = {}
    superseded: list[tuple[int, int]] = []
    """As in `AgentClosed`."""


class GroupScored(Event):
    """A group that is scored as a whole has its rewards; the lease ends. One entry for each live sample, in order."""

    lease_id: int
    rewards: list[float]
    details: list[dict[str, float]]


class LeaseEnded(Event):
    """A lease has ended without finishing its sample, which waits again or is dead."""

    lease_id: int
    cause: str
    """abort | leave | recall | lost | expired | generation_failed | environment_failed | scoring_failed |
    agent_failed"""
    error: str = ""
    at: float = 0.0
    """Unix seconds; 0 if unknown."""


class GroupDiscarded(Event):
    """A group will not be trained."""

    group: int
    reason: str


class GroupRequeued(Event):
    """The prompt of a group that was discarded for a dead sample is to be drawn again, before fresh ones."""

    group: int


class EvaluationRecorded(Event):
    """The evaluation of policy step `step` is complete; its groups are no longer needed."""

    step: int
    result: dict[str, Any]
    """The result, as summary.json has it."""


class DrainStarted(Event):
    """Nothing is handed out, and leases up to the watermark are to be handed back."""

    watermark: int


class DrainEnded(Event):
    pass


class RoundStarted(Event):
    round: int


class RoundEnded(Event):
    """A round has ended; leases up to the watermark are to be handed back."""

    round: int
    watermark: int


class BatchDelivered(Event):
    """Batch `step` consists of these groups."""

    step: int
    groups: list[int]


class BatchConsumed(Event):
    """The learner is past batch `step`."""

    step: int
    discarded: str = ""
    """`nonfinite` if the batch was skipped; "" if it was trained."""


class CheckpointDurable(Event):
    """Checkpoint `step` is on disk; no restart will use one older than `oldest`."""

    step: int
    oldest: int


class LearnerStarted(Event):
    """A learner goes on from checkpoint `step` as a new incarnation; later batches are delivered again."""

    incarnation: int
    step: int
    uid: str = ""
    """Uid of the learner process, by which a restarted broker recognises it."""
    weights_address: str = ""
    weights_key: str = ""


class TimePassed(Event):
    """The events after this one happened at `at` (Unix seconds) or shortly later."""

    at: float


EVENTS = Event.__subclasses__()
if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = reduce(or_, EVENTS)
