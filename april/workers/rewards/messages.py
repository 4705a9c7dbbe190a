"""What a reward pool and its verifier processes say to each other."""

from collections.abc import Callable

import msgspec

OVER_LIMIT = "over_limit"
"""the detail that counts responses which their verifier could not decide"""


class RewardRules(msgspec.Struct, frozen=True):
    """What is the same for all items of a run; the keys of [reward]."""

    timeout_s: float = 10.0
    verifiers: tuple[str, ...] = ()
    """those that a process loads before its first item, since what they import, or do first, may take longer than an
    item"""
    memory_mb: int = 4096
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    max_response_tokens: int = 0
    """the budget of a response, whose end the overlong buffer is"""
    format_pattern: str = ""
    format_penalty: float = 0.0
    url: str = ""
    """of the remote reward model"""
    code_test_s: float = 4.0
    code_memory_mb: int = 1024
    over_limit: str = "wrong"
    """what a response is that its verifier cannot decide within its limits: failed (no reward) | wrong"""
    traced: bool = False
    """errors hold the whole traceback"""


class Undecided(RuntimeError):
    """A verifier cannot decide a response within its limits. The response's doing, and no fault of what runs it."""


class Item(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One response to verify."""

    key: int
    verifier: str
    response: str
    label: str
    finish_reason: str
    prompt: str = ""
    tokens: int = 0
    """of the response"""
    state: bytes = b""
    """of its environment at the end, MessagePack; empty without one"""
    over_time: int = 0
    """processes that it has kept longer than the time limit"""


class GroupItem(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All responses to a prompt, for a verifier that sees them together."""

    key: int
    verifier: str
    items: list[Item]
    over_time: int = 0


class Score(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The reward of an item, or why it, or a group, has none."""

    key: int
    reward: float | None
    error: str | None = None
    details: dict[str, float] = {}
    """what the reward is made of"""


class GroupScore(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The rewards of a group's items, in their order."""

    key: int
    scores: list[Score]


BatchVerifier = Callable[[list[Item], RewardRules], list[Score]]
"""scores several items at once, and knows the run's rules"""


def takes_items(verifier: BatchVerifier) -> BatchVerifier:
    """Mark one, which is told from a verifier of one response by that."""
    vars(verifier)["takes_items"] = True
    return verifier
