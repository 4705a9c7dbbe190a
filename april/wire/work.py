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
    from the snapshot."""

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
    """The prompt as its row of the dataset has it, a text or chat messages, as JSON; "" unless the verifier takes the
    prompt."""
    teacher: str = ""
    """Name of the teacher (a second model) whose log-probabilities of each response are wanted as a token score; "" for
    none."""
    images: list[str] = []
    """Names of the prompt's images, in order; `FetchImages` gets them."""
    max_response_tokens: int = 0
    """Limit on the response's length (tokens), observations included."""

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
    """Whether the response is complete, so that the holder only has to score it."""
    max_new_tokens: int
    seed: int
    finish_reason: str
    """Finish reason of the response if `scoring`; otherwise ""."""
    hand_over: bool
    """Whether the lease ends with the response's last tokens, since a scorer then gets a lease of its own for the
    score."""
    group_scored: list[str]
    """Finish reasons of all responses of a group, if the grant is for scoring the group as a whole; otherwise empty."""
    turns: int
    """Number of turns of the policy in the response so far that the environment has answered."""
    turn_start: int
    """Offset in the response at which the current turn starts, tokens."""
    state: bytes
    """Environment state after the last observation; with `group_scored` a MessagePack array with the state of every
    response."""
    stop_token_ids: list[int]
    """Token ids that end the turn, in addition to those that end every turn."""
    shown_images: list[tuple[Name, Number]] = []
    """For each image in the response so far, in order: (name, offset in the response from which its placeholder tokens
    are looked for). The prompt's images come before these. Empty if `scoring`."""
    forks: list[Number] = []
    """Only if a teacher scores agent sessions. For each fork (branch of a session's conversation) with sampled tokens,
    session by session: the offset of its first sampled token. The forks' token arrays follow the response arrays in the
    message."""
    rewarded: bool = False
    """Whether the agent has already set the final reward, so that only the teacher's token scores are needed."""

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
    """For an agent session: (fork number, length). An earlier execution of the agent had gone on with this fork, a
    branch of the conversation; the execution that ended the session has used only the fork's first `length` tokens."""
    state: bytes = b""
    """For an agent session: what the agent left for a verifier that scores the whole group, as MessagePack; may be
    empty."""


class TokenScored(Scored, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A score with token scores or feedback, in a report without rows. The report's array has the values of all its
    `TokenScored`. Values that are too many for one report are divided: the same `TokenScored` is sent in several
    reports, each with the next part of the values, and the last one ends the lease."""

    columns: list[dict[Name, Number]] = []
    """One mapping for each response, from the name of each token score to its number of values, in the order of the
    values. That is the number of the response's tokens, observations included, or a multiple of it (several values per
    token), or the number of the policy's turns. For agent sessions: one mapping for each of the grant's `forks`, for
    its tokens from the first sampled one on."""
    start: Number = 0
    """Number of values of this `TokenScored` that earlier reports had."""
    feedback: list[str] = []
    """For each response, the text that its verifier gave beside the reward, or ""; empty if no response has any."""


class GiveBack(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ends a lease without finishing the sample: the holder stops working on it, for the given cause."""

    lease_id: int
    length: Number
    """Length of the response in tokens when the sample is given back, including the tokens in the same report."""
    cause: GiveBackCause
    error: str = ""


class Closed(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ends an agent session without a reward: a verifier scores the session later."""

    lease_id: int
    superseded: list[tuple[Number, Number]] = []
    """(fork number, length). An earlier execution of the agent had gone on with this fork, a branch of the
    conversation; the execution that ended the session has used only the fork's first `length` tokens."""
    state: bytes = b""
    """State as MessagePack that the agent leaves for the verifier; may be empty."""


Closing = Scored | TokenScored | GiveBack | Closed


class Report(Message):
    """A holder's new tokens, and the leases that end after them.

    Two uint8 arrays, or none without new tokens: rows (`wire.rows`) and their payloads. Or one float32 array: the
    token-score values of the `TokenScored` in `closings`.
    """

    closings: list[Closing] = []


class Answers(Message):
    """What became of the reports since the last `Answers`, by lease. Sent once their content is on the broker's
    disk."""

    acks: list[tuple[int, int]] = []
    """(lease id, length): response tokens below the length are on disk."""
    done: list[int] = []
    """Ids of the leases that have ended, for which this is on the broker's disk."""
    nacks: list[tuple[int, int]] = []
    """(lease id, length): response tokens from the length on are missing; the holder has to report them again."""
    rejects: list[tuple[int, str]] = []
    """(lease id, reason): the report on this lease was rejected, and the holder drops the lease. If the reason begins
    with `BAD_ROW`, the lease is still current, and the holder gives it back."""


BAD_ROW = "bad row: "
"""Beginning of a reject's reason if the payload of a row was faulty."""


class Abort(Message):
    """Recalls every lease with an id up to the watermark, including leases whose grants arrive later."""

    round: int
    watermark: int


class Cancel(Message):
    """Tells a holder that it shall not go on with these leases. Without `hand_back` they have ended, and the holder
    drops their samples without an answer; with it, the holder gives the leases back."""

    lease_ids: list[int]
    hand_back: bool = False
    """Whether the leases are still current, so that the holder gives back each that is still generating, with its
    tokens and the cause `recall`."""


class Evaluating(Message):
    """Names the policy steps whose weights are wanted for held-out samples that wait. A worker that has weights of such
    a step loads no others meanwhile, but for at most `evaluation.hold_s`."""

    steps: list[int]


class ActivitySpan(Message):
    """Activity of a worker from `start` to `end` (Unix time, seconds), for the timeline."""

    kind: Literal["generate"]
    start: float
    end: float


# --- agents processes -------------------------------------------------------------------------------------------------


MAX_STOP_TOKENS = 16
"""Maximum number of token ids that one turn may name as stop tokens."""
MAX_KEY_BYTES = 64
"""Maximum number of bytes of `TurnRequest.key`."""
MAX_FORKS = 256
"""Maximum number of forks of a session, the first one (fork 0) included. A session's lease id is a multiple of this
number and is also the id of fork 0; the id of fork k is the lease id plus k."""


def session_lease_id(lease_id: int) -> int:
    """The lease id of the session to which the id of a fork belongs."""
    return lease_id - lease_id % MAX_FORKS


class TurnRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How to sample the turn that follows an observation; stored as MessagePack in the observation's state."""

    key: bytes
    """Hash of the agent's request. If the agent program is run again, the same request has the same key and gets the
    answer that was recorded."""
    max_tokens: Number
    """Maximum number of tokens of the turn."""
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
    """Tokens of the receiver's sessions that have been journaled since the last message. Two uint8 arrays: rows (with
    the ids of forks in place of lease ids) and their payloads. A row's finish reason is that of the turn that it
    ends."""


class HolderRequest(Message):
    """Asks which agents process holds a session. The fields are those of the session key with which a client's request
    came."""

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
