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
    """Most frames of a message, header and body included."""
    arrays: int
    """Most arrays of a message."""
    message_bytes: int
    body_bytes: int
    """Most bytes of the body, per array of the message; a message without arrays has the limit of one array."""


FROM_PEER = Limits(frame_bytes=4 << 20, frames=4, arrays=2, message_bytes=8 << 20, body_bytes=256 << 10)
"""Bounds on messages to the broker or the learner's publisher. The largest are reports."""
MAX_REPORT_BYTES, MAX_REPORT_ROWS, MAX_REPORT_CLOSINGS = FROM_PEER.frame_bytes, 8192, 64
"""Most bytes, rows and closed leases in one report. A worker that has more sends several reports, split between two
rows."""
FROM_BROKER = Limits(frame_bytes=1 << 30, frames=2 + 0xFFFF, arrays=0xFFFF, message_bytes=16 << 30, body_bytes=64 << 20)
"""Bounds on messages to a peer. The largest are batches (two or four arrays per sample) and manifests of large
models."""

MAX_GRANT_ARRAYS = 4096
"""Most response arrays in one `Grants` message; further grants go into the next message."""
UPLOAD_QUEUE_MESSAGES = 32
"""Most messages of one connection that the receiver's socket queues; further ones wait at the sender."""
HANDSHAKE_S = 10.0
"""Seconds after which a connection without a completed handshake is closed."""

MAX_CLOCK_SKEW_S = 86_400.0
"""Largest difference between a peer's clock and the broker's (seconds). A time beyond it is refused or taken as
unknown, since it would stretch the time axis of the run's charts."""
MAX_CHUNK_TOKENS = 1 << 18
"""Most tokens in one row of a report."""
MAX_TOP_K = 1024
"""Largest `sampling.top_k` of training samples."""
MAX_SUPPORT_IDS = 4096
"""Most ids in the support of one token: the top k, and ids exactly as likely as the last of them."""
MAX_CUT_CHUNK_TOKENS = FROM_PEER.frame_bytes // (4 * (MAX_SUPPORT_IDS + 3))
"""Most tokens of a chunk with supports, so that it fits into a frame even if every support has the largest size."""
MAX_STEP_METRICS = 1024
"""Most metrics that a learner may report for one step."""
PENALTIES = ("overlong", "format")
"""Names of the reward details that are penalties, which April adds to a reward."""
OWN_REWARD = "reward"
"""Reserved name among [reward.part]: the part of the reward that the run's own verifier (`reward.name`) gives."""
RESERVED_DETAILS = ("correct", "base", "over_limit", *PENALTIES)
"""Details of a reward that April itself reads or adds; they do not count towards `MAX_REWARD_DETAILS`."""
MAX_REWARD_DETAILS = 16
"""Most named components (details) of one reward, besides the reserved ones."""


def too_many_details(details: Iterable[str]) -> bool:
    return len({*details} - {*RESERVED_DETAILS}) > MAX_REWARD_DETAILS


MAX_REWARD = 1e9
"""Largest absolute value of a reward and of its details, so that sums of them stay finite."""
MAX_TOKEN_SCORES = 8
"""Most named token scores of one response."""
MAX_TEACHER_TOP_K = 256
"""Largest `teacher.NAME.top_k`."""
MAX_VALUES_PER_TOKEN = 2 * MAX_TEACHER_TOP_K
"""Most values of one token score for each token: an id and a log-probability for each of a teacher's top k."""
MAX_TOKEN_SCORE_BYTES = 64 << 20
"""Most bytes of token scores for one lease; more than `MAX_REPORT_BYTES` are split over several reports."""
FEEDBACK = "feedback"
"""Key of a verifier's result for its text feedback on a response, which is returned beside the reward's details."""
MAX_FEEDBACK_CHARACTERS = 32_768
"""Most characters of feedback in one score; a score of a whole group counts its responses together."""
MAX_ACTIVITY_SPANS = 20_000
"""Most spans of worker activity in one line of metrics.jsonl; further ones are not recorded."""
MAX_TALLIES = 16_384
"""Most worker processes with separate token counts; the counts of the processes that left first are merged."""
MAX_STATE_BYTES = 64 << 10
"""Most bytes of an environment's state between two turns; every grant of its sample carries that state."""
MAX_AGENT_STATE_BYTES = 4 << 10
"""Most bytes of the state that an agent leaves for the verifier; the broker keeps it in memory until the session is
scored."""
MAX_TEXT_CHARACTERS = 500
"""Most characters of an error text or reason."""


def is_reward(value: float) -> bool:
    """Whether a number is finite and at most `MAX_REWARD` in absolute value."""
    return abs(value) <= MAX_REWARD


def reward_details(given: Any) -> dict[str, float]:
    """The details that an agent gives with its reward (`given`), checked. Raises ValueError unless they are finite
    numbers by name."""
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
