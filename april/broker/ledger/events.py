"""The facts that the broker writes down. Applying them in order to an empty ledger rebuilds it.

Token ids and logprobs are not part of an event; they lie beside it in its record.
"""

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, dataclass_transform

import msgspec

from april.wire.rows import ROW, Row, read_rows

Part = tuple[int, bytes | memoryview]
"""(crc32, data) of an array beside an event"""


@dataclass_transform(frozen_default=True)
class Event(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One journalled fact; the class name is its tag on disk."""

    @property
    def weight(self) -> int:
        """How many facts it stands for, as far as the time of a restart goes."""
        return 1


class RunStarted(Event):
    """The first record: what a restart must find unchanged. The schedule may be another, since each keeps these."""

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
    """of each training token, because the distribution is cut"""
    temperature: float = 1.0
    """of the policy whose log-probabilities lie beside the tokens"""
    fingerprints: dict[str, str] = {}
    """of what configuration keys name, by key"""


class BrokerStarted(Event):
    """`start` counts the starts of the broker and is the upper half of every lease id."""

    start: int


class GroupOpened(Event):
    """Drawing a prompt and creating its group are one fact; (epoch, row) is the prompt cursor.

    For evaluation, `epoch` is the number of its set and `floor` the policy step that is evaluated. Array: the prompt's
    token ids, int32.
    """

    group: int
    evaluation: bool
    epoch: int
    row: int
    size: int
    floor: int
    prompt_tokens: int
    replaces: int | None = None
    """the dead group whose prompt is drawn again; the cursor stays where it is"""
    together: bool = False
    """its samples are scored together, when all of them are generated"""


class PromptSubmitted(Event):
    """The trainer has brought a prompt, the `row`-th from 0. Array: its token ids, int32."""

    row: int
    label: str
    reward: str
    """name of its verifier, "" for the run's"""
    extra: bytes
    """the trainer's own, which comes back with the group"""


class Leased(Event):
    """With `scoring` of a group that is scored together, all of its samples that live; `index` is the first's."""

    lease_id: int
    group: int
    index: int
    worker: str
    step: int
    scoring: bool
    branch: int = 0
    """of the sample's session"""


class AgentLeased(Event):
    """An agents process has opened the session of a sample, or opens it again. Its lease has an id for each branch:
    `wire.BRANCHES` of them, from `lease_id` on, which is a multiple of that."""

    lease_id: int
    group: int
    index: int
    holder: str


class AgentClosed(Event):
    """The agent has nothing more to say, and the sample waits for a verifier."""

    lease_id: int
    superseded: list[tuple[int, int]] = []
    """(branch, length): what lies behind was said to an earlier execution of its agent, and the last knows it not"""
    state: bytes = b""
    """that the agent leaves to the verifier"""


class RowsAccepted(Event):
    """New tokens of many samples: chunks, and what environments have answered or agents have said. A row under an id
    that no branch of a session has begins that branch. Array: the payloads of the rows, one behind the other."""

    table: bytes
    """one row of 48 bytes for each, as in a worker's report"""
    payload_bytes: int

    @property
    def rows(self) -> Iterator[Row]:
        return read_rows(self.table)

    @property
    def weight(self) -> int:
        return len(self.table) // ROW.size


class SessionLost(Event):
    """Nobody runs the agent of a sample any more, and it may not be run again: the sample is dead."""

    group: int
    index: int


class SampleScored(Event):
    lease_id: int
    reward: float
    details: dict[str, float] = {}
    superseded: list[tuple[int, int]] = []
    """as in `AgentClosed`"""


class GroupScored(Event):
    """The end of a lease on a whole group: rewards and details of those of its samples that live, in their order."""

    lease_id: int
    rewards: list[float]
    details: list[dict[str, float]]


class LeaseEnded(Event):
    """cause: abort | leave | recall | lost | expired | generation_failed | environment_failed | scoring_failed |
    agent_failed"""

    lease_id: int
    cause: str
    error: str = ""
    at: float = 0.0
    """Unix seconds"""


class GroupDiscarded(Event):
    group: int
    reason: str


class GroupRequeued(Event):
    """The prompt of a group that lost a sample for good is to be drawn again, ahead of fresh ones."""

    group: int


class EvaluationRecorded(Event):
    """The evaluation of policy step `step` is over, and this is what it showed; its groups are not needed any more."""

    step: int
    result: dict[str, Any]
    """as in summary.json"""


class DrainStarted(Event):
    """Nothing is handed out any more, and grants up to the watermark are to be handed back."""

    watermark: int


class DrainEnded(Event):
    pass


class RoundStarted(Event):
    round: int


class RoundEnded(Event):
    round: int
    watermark: int


class BatchDelivered(Event):
    step: int
    groups: list[int]


class BatchConsumed(Event):
    step: int
    discarded: str = ""
    """nonfinite: it changed nothing; "" if it was trained"""


class CheckpointDurable(Event):
    """Checkpoint `step` is on disk; none older than `oldest` will ever be asked for again."""

    step: int
    oldest: int


class LearnerStarted(Event):
    """The learner goes on from checkpoint `step` under a new branch; later batches are delivered again."""

    branch: int
    step: int
    uid: str = ""
    """of the learner's process, which a restarted broker knows again"""
    weights_address: str = ""
    weights_key: str = ""


class TimePassed(Event):
    """What follows happened at `at` (Unix seconds) or a little later."""

    at: float


EVENTS = Event.__subclasses__()
if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = reduce(or_, EVENTS)
