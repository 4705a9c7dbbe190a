"""Messages between the broker and holders of leases: workers, scorers and agents processes."""

from typing import Literal

import msgspec

from april.wire.message import Address, Message, Name, Number, Version

GiveBackCause = Literal[
    "abort", "leave", "recall", "generation_failed", "environment_failed", "scoring_failed", "agent_failed"
]


class WorkerCapacity(Message):
    """Tells the broker which weights a worker samples from, and how many samples it generates at once."""

    version: Version
    capacity: Number
    loaded_in_s: float = 0.0
    """Time that the worker took to load these weights, seconds."""


class WeightFolderRefused(Message):
    """Tells the broker that a worker could not use a snapshot of weights, or that its engine did not take the weights
    from there."""

    version: Version
    error: str


class HolderCapacity(Message):
    """Tells the broker how many leases a scorer, or how many sessions an agents process, holds at once."""

    capacity: Number
    address: Address = ""
    """Base URL at which other agents processes reach the API of this agents process."""


class Task(msgspec.Struct, array_like=True, frozen=True):
    """The fields of grants that the samples of a group share."""

    group: int
    evaluation: bool
    label: str
    reward: str
    """Name of the verifier."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    row_prompt: str = ""
    """The prompt as its row has it, JSON: a text or chat messages. Only for a verifier that gets it; otherwise ""."""
    teacher: str = ""
    """Name of the teacher whose log-probabilities are a token score of each response; "" for none."""
    images: list[str] = []
    """Names of the prompt's images, in order; `FetchImages` gets them."""
    max_response_tokens: int = 0
    """Longest response (tokens), observations included."""

    @property
    def is_cut(self) -> bool:
        """Whether top-k, top-p or min-p truncates the distribution that tokens are sampled from."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """A lease granted on a sample, or on the scoring of a whole group."""

    lease_id: int
    task_index: int
    """Index of the grant's task in `Grants.tasks`."""
    index: int
    """Index of the sample in its group."""
    scoring: bool
    """Whether the response is complete, so that only its score is needed."""
    max_new_tokens: int
    seed: int
    finish_reason: str
    """Finish reason of the response if `scoring`; otherwise ""."""
    hand_over: bool
    """Whether the lease ends with the response's last tokens; another lease is then granted for the score."""
    group_scored: list[str]
    """Finish reasons of all responses of a group, if the grant is for scoring the group as a whole; otherwise empty."""
    turns: int
    """Number of the policy's turns that the environment has answered."""
    turn_start: int
    """Offset in the response at which the current turn starts, tokens."""
    state: bytes
    """Environment state after the last observation; with `group_scored` a MessagePack array with the state of every
    response."""
    stop_token_ids: list[int]
    """Token ids that end the turn, in addition to those that end every turn."""
    shown_images: list[tuple[Name, Number]] = []
    """(name, offset in the response of the first token that may be a placeholder of it) of each image in the response
    so far, in order; they follow those of the prompt. Empty if `scoring`."""
    forks: list[Number] = []
    """For a teacher of agents' sessions: offset of the first token that the policy sampled, for each fork in which it
    has sampled some, session by session. Their arrays follow the responses."""
    rewarded: bool = False
    """Whether the agent has said the reward, which stands, so that only the teacher is asked."""

    @property
    def responses(self) -> int:
        """Number of response arrays of the message that belong to this grant."""
        return (len(self.group_scored) or 1) + len(self.forks)


class Grants(Message):
    """New leases; leases of one group share a task. Int32 arrays: the prompt [P] of each task, then per grant the
    response so far [T] or, with `group_scored`, every response of the group; then each of its `forks`."""

    tasks: list[Task]
    grants: list[Grant]


class Scored(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ends a lease with the score of its response, or of all responses of a group if the grant had `group_scored`."""

    lease_id: int
    rewards: list[float]
    details: list[dict[Name, float]]
    """Named components of each reward."""
    superseded: list[tuple[Number, Number]] = []
    """For an agent session: (fork number, length); tokens after the length were seen only by an earlier execution of
    the agent."""
    state: bytes = b""
    """For an agent session: state as MessagePack, for a verifier that scores the whole group."""


class TokenScored(Scored, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A score with token scores or feedback, in a report without rows. The values of all closings are the report's
    array; a closing with more than a report holds is repeated in several, each with the next part of them, and counts
    with the last."""

    columns: list[dict[Name, Number]] = []
    """Number of values of each token score, by its name and in the order of the values; one mapping for each response.
    As many as the response has tokens, those of observations included, or a multiple of that, token by token; or as
    many as the policy has taken turns in it. Of agents' sessions for each of the grant's `forks`, for its tokens from
    the first that the policy sampled on."""
    start: Number = 0
    """Number of its values that came before, in the reports just before this one."""
    feedback: list[str] = []
    """For each response, the text that its verifier gave beside the reward, or ""; empty if no response has any."""


class GiveBack(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ends a lease without finishing the sample: the holder stops working on it, for the given cause."""

    lease_id: int
    length: Number
    """Response length in tokens, including tokens in the same report."""
    cause: GiveBackCause
    error: str = ""


class Closed(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ends an agent session without a reward: a verifier scores the session later."""

    lease_id: int
    superseded: list[tuple[Number, Number]] = []
    """(fork number, length): tokens after the length were seen only by an earlier execution of the agent."""
    state: bytes = b""
    """State as MessagePack that the agent leaves for the verifier; may be empty."""


Closing = Scored | TokenScored | GiveBack | Closed


class Report(Message):
    """A holder's new tokens, and the leases that end after them.

    Two uint8 arrays, or none without new tokens: rows (`wire.rows`) and their payloads. Or one float32 array: the
    values of the closings' token scores (`TokenScored`).
    """

    closings: list[Closing] = []


class Answers(Message):
    """The outcome of the reports since the last `Answers`; sent once they are on disk."""

    acks: list[tuple[int, int]] = []
    """(lease id, length): response tokens below the length are on disk."""
    done: list[int] = []
    """Ids of the leases whose end is on disk."""
    nacks: list[tuple[int, int]] = []
    """(lease id, length): response tokens from the length on are missing; the holder has to report them again."""
    rejects: list[tuple[int, str]] = []
    """(lease id, reason): the report on this lease was rejected; drop the lease. After `BAD_ROW` it goes on in the
    ledger, and is to be given back."""


BAD_ROW = "bad row: "
"""Beginning of the reason where the payload of a row was at fault."""


class Abort(Message):
    """Recalls every lease with an id up to the watermark, including leases whose grants arrive later."""

    round: int
    watermark: int


class Cancel(Message):
    """Tells a holder that these leases have ended, so that it drops their samples without an answer; with `hand_back`,
    to give the leases back."""

    lease_ids: list[int]
    hand_back: bool = False
    """Whether the leases are still current, so that the holder gives back each that is still generating, with its
    tokens and the cause `recall`."""


class Evaluating(Message):
    """Names the policy steps at which held-out samples wait for a worker with weights of that step. Such a worker loads
    no other weights meanwhile, at most `evaluation.hold_s`."""

    steps: list[int]


class ActivitySpan(Message):
    """Activity of a worker from `start` to `end` (Unix time, seconds), for the timeline."""

    kind: Literal["generate"]
    start: float
    end: float


# --- agents processes -------------------------------------------------------------------------------------------------


MAX_STOP_TOKENS = 16
"""Most token ids that one turn may name as stop tokens."""
MAX_KEY_BYTES = 64
"""Most bytes of `TurnRequest.key`."""
MAX_FORKS = 256
"""Most forks of a session, the first one (fork 0) included. A session's lease id is a multiple of this number and is
also the id of fork 0; the id of fork k is the lease id plus k."""


def session_lease_id(lease_id: int) -> int:
    """The lease id of the session to which the id of a fork belongs."""
    return lease_id - lease_id % MAX_FORKS


class TurnRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How to sample the turn that follows an observation; stored as MessagePack in the observation's state."""

    key: bytes
    """Hash of the request, by which a replayed agent finds the recorded answer to it."""
    max_tokens: Number
    """Most tokens of the turn."""
    stop_token_ids: list[int] = []
    """Token ids that end the turn, in addition to those that end every turn."""
    images: list[Name] = []
    """Names of the images in the observation, in the order of their placeholders; the broker has kept them."""


class AgentSession(msgspec.Struct, array_like=True, frozen=True):
    """A lease on a sample whose agent program the receiving agents process has to run."""

    lease_id: int
    group: int
    index: int
    evaluation: bool
    prompt: str
    """JSON of the dataset row's prompt: a text or chat messages."""
    label: str
    max_tokens: int
    """Token budget of the whole session, input and output together."""
    temperature: float


class AgentSessionList(Message):
    """Agent sessions to run. Two uint8 arrays per session: rows and payloads, as in a report, of the session's history
    so far. After a new `Hello`, sessions that the peer still holds are sent once more."""

    sessions: list[AgentSession]


class SessionTurns(Message):
    """Newly journaled tokens of the receiver's sessions. Two uint8 arrays: rows (with fork ids) and their payloads.
    The finish reason of a row is the turn's."""


class HolderRequest(Message):
    """Asks which agents process holds a session. The fields come from the session key that a client has shown."""

    group: Number
    index: Number
    lease_id: Number


class Holder(Message):
    """Answer to `HolderRequest`: the session is `held` by the process at `address`, has `moved` to another lease (which
    may still have to be granted), or is `over`."""

    group: int
    index: int
    lease_id: int
    state: Literal["held", "moved", "over"]
    address: str = ""
    """Base URL of the holder's API; "" while the holder is not connected."""
