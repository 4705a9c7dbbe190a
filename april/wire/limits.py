"""Bounds on what a peer may send, and on what the broker keeps of a peer's messages.

Bounds that depend on the size of a cluster are configuration keys instead (`security.max_sessions`,
`security.max_leases`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Bounds on messages in one direction. A larger frame closes the connection; a message that breaks another bound is
    refused."""

    frame_bytes: int
    frames: int
    """Maximum number of frames of a message, header and body included."""
    arrays: int
    """Maximum number of arrays of a message."""
    message_bytes: int
    body_bytes: int
    """Maximum number of bytes of a message's body for each array of the message. A message without arrays may have as
    many as one with one."""


FROM_PEER = Limits(frame_bytes=4 << 20, frames=4, arrays=2, message_bytes=8 << 20, body_bytes=256 << 10)
"""Bounds (bytes, frames, arrays) on a message that a peer sends to the broker or the learner's publisher. The largest
messages are reports."""
MAX_REPORT_BYTES, MAX_REPORT_ROWS, MAX_REPORT_CLOSINGS = FROM_PEER.frame_bytes, 8192, 64
"""Maximum number of bytes, rows, and leases ended in one report. A worker that has more to report sends several
reports, divided between two rows."""
FROM_BROKER = Limits(frame_bytes=1 << 30, frames=2 + 0xFFFF, arrays=0xFFFF, message_bytes=16 << 30, body_bytes=64 << 20)
"""Bounds (bytes, frames, arrays) on a message that a peer receives from the broker or the learner's publisher. The
largest messages are batches for the learner, with two or four arrays per sample, and manifests of large models."""

MAX_GRANT_ARRAYS = 4096
"""Maximum number of response arrays in one `Grants` message; further grants go into the next message."""
UPLOAD_QUEUE_MESSAGES = 32
"""Maximum number of messages of one connection that the receiver's socket queues; further ones wait at the sender."""
HANDSHAKE_S = 10.0
"""Seconds after which a connection without a completed handshake is closed."""

MAX_CLOCK_SKEW_S = 86_400.0
"""Maximum difference that is accepted between a peer's clock and the broker's (seconds). A time beyond it is refused or
taken as unknown, since it would stretch the time axis of the run's charts."""
MAX_CHUNK_TOKENS = 1 << 18
"""Maximum number of tokens in one row of a report."""
MAX_TOP_K = 1024
"""Maximum value of `sampling.top_k` for training samples."""
MAX_SUPPORT_IDS = 4096
"""Maximum number of ids in the support of one token: the top k, and ids exactly as likely as the last of them."""
MAX_CUT_CHUNK_TOKENS = FROM_PEER.frame_bytes // (4 * (MAX_SUPPORT_IDS + 3))
"""Maximum number of tokens of a chunk with supports, so that it fits into a frame even if every support has the largest
size."""
MAX_STEP_METRICS = 1024
"""Maximum number of metrics that a learner may report for one step."""
PENALTIES = ("overlong", "format")
"""Names of those details of a reward (its named components) that are penalties, which April adds to the reward."""
OWN_REWARD = "reward"
"""Reserved name among [reward.part]: the part of the reward that the run's own verifier (`reward.name`) gives."""
RESERVED_DETAILS = ("correct", "base", "over_limit", *PENALTIES)
"""Names of those details (named components) of a reward that April itself reads or adds; they do not count towards
`MAX_REWARD_DETAILS`."""
MAX_REWARD_DETAILS = 16
"""Maximum number of named components (details) of one reward, besides the reserved ones."""


def too_many_details(details: Iterable[str]) -> bool:
    return len({*details} - {*RESERVED_DETAILS}) > MAX_REWARD_DETAILS


MAX_REWARD = 1e9
"""Maximum absolute value of a reward and of its details (named components), so that sums of them stay finite."""
MAX_TOKEN_SCORES = 8
"""Largest number of token scores (named lists of values for a response's tokens, such as a teacher's) of one
response."""
MAX_TEACHER_TOP_K = 256
"""Maximum value of `teacher.NAME.top_k`."""
MAX_VALUES_PER_TOKEN = 2 * MAX_TEACHER_TOP_K
"""Maximum number of values that one token score may have for each token: an id and a log-probability for each of a
teacher's top k ids."""
MAX_TOKEN_SCORE_BYTES = 64 << 20
"""Maximum number of bytes of token scores for one lease; more than `MAX_REPORT_BYTES` are split over several
reports."""
FEEDBACK = "feedback"
"""Key under which a verifier's result has its feedback, a text on the response, beside the reward and the reward's
details."""
MAX_FEEDBACK_CHARACTERS = 32_768
"""Maximum number of characters of feedback in one score; a score of a whole group counts its responses together."""
MAX_ACTIVITY_SPANS = 20_000
"""Maximum number of spans of worker activity in one line of metrics.jsonl; further ones are not recorded."""
MAX_TALLIES = 16_384
"""Largest number of worker processes whose tokens the broker counts separately. Beyond it, the counts of the processes
that disconnected first are added up into one."""
MAX_STATE_BYTES = 64 << 10
"""Maximum number of bytes of an environment's state between two turns; every grant of its sample carries that state."""
MAX_AGENT_STATE_BYTES = 4 << 10
"""Maximum number of bytes of the state that an agent leaves for the verifier; the broker keeps it in memory until the
session is scored."""
MAX_TEXT_CHARACTERS = 500
"""Maximum number of characters of an error text or of a reason in a message."""


def is_reward(value: float) -> bool:
    """Whether a number is finite and at most `MAX_REWARD` in absolute value."""
    return abs(value) <= MAX_REWARD


def reward_details(given: Any) -> dict[str, float]:
    """Check and return the details (named components) that an agent gives with its reward, `given`. Raises ValueError
    unless they are a mapping from names to finite numbers."""
    are_numbers = isinstance(given, dict) and all(
        isinstance(name, str) and name.isprintable() and len(name) <= 128
        and isinstance(value, int | float) and is_reward(value)
        for name, value in given.items()
    )  # fmt: skip
    if not are_numbers or too_many_details(given):
        raise ValueError(f"{given!r} is no table of finite numbers by name, at most {MAX_REWARD_DETAILS}")
    return {name: float(value) for name, value in given.items()}


def clip(text: str, characters: int = MAX_TEXT_CHARACTERS) -> str:
    """A peer's text shortened and without unprintable characters, fit for one line of a log."""
    return "".join(c if c.isprintable() else " " for c in text[:characters])
