"""How much a peer may send, and how much of it is remembered: whatever grows with what a peer says has its bound here.

What depends on the size of a cluster is a key of the configuration instead (`security.max_sessions`,
`security.max_leases`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one direction. A frame beyond `frame_bytes` costs the connection; the rest is refused with a sentence."""

    frame_bytes: int
    frames: int
    """of a message, header and body included"""
    arrays: int
    message_bytes: int
    body_bytes: int
    """once for every array of the message, at least once"""


FROM_PEER = Limits(frame_bytes=4 << 20, frames=4, arrays=2, message_bytes=8 << 20, body_bytes=256 << 10)
"""to the broker or the learner's publisher: the largest are reports, rows and their payloads"""
REPORT_BYTES, REPORT_ROWS, REPORT_CLOSINGS = FROM_PEER.frame_bytes, 8192, 64
"""most that a report has; a worker splits what is more between two rows"""
FROM_BROKER = Limits(frame_bytes=1 << 30, frames=2 + 0xFFFF, arrays=0xFFFF, message_bytes=16 << 30, body_bytes=64 << 20)
"""to a peer: the largest are batches, two or four arrays for each sample, and the manifests of large models"""

GRANT_ARRAYS = 4096
"""responses of a message of grants; further grants go into another one"""
UPLOAD_QUEUE_MESSAGES = 32
"""messages of one connection that wait in the receiver's socket; more wait in the sender's"""
HANDSHAKE_S = 10.0
"""a connection that has not said who it is by then is closed"""

CHUNK_TOKENS = 1 << 18
"""of one row"""
TOP_K = 1024
"""of training samples whose distribution is cut"""
SUPPORT_IDS = 4096
"""that one token may have been drawn from: the top k, and whatever is as likely as the last of them"""
CUT_CHUNK_TOKENS = FROM_PEER.frame_bytes // (4 * (SUPPORT_IDS + 3))
"""of a chunk with supports, so that it fits into a frame whatever they are"""
METRICS = 1024
"""figures that a learner reports of one step"""
DETAILS = 16
"""figures that a reward is made of"""
REWARD = 1e9
"""largest size of a reward and of a figure that it is made of: sums of them stay finite"""
LANE_RECORDS = 20_000
"""spans of workers' activities kept for one line of metrics.jsonl; further ones are not recorded"""
TALLIES = 16_384
"""worker processes whose tokens are told apart; those that left first are added up"""
STATE_BYTES = 64 << 10
"""of an environment between two turns, which every grant of its sample carries"""
LEFT_BYTES = 4 << 10
"""of the state that an agent leaves, which the broker keeps in memory until the session is scored"""
TEXT_CHARACTERS = 500
"""of an error or a reason"""


def is_reward(value: float) -> bool:
    """Whether it is a finite number of a size that a reward may have."""
    return abs(value) <= REWARD


def clip(text: str, characters: int = TEXT_CHARACTERS) -> str:
    """Text of a peer, fit for one line of a log."""
    return "".join(c if c.isprintable() else " " for c in text[:characters])
