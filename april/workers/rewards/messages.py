"""Messages between a reward pool and its verifier processes."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

import msgspec

from april.wire.limits import FEEDBACK

OVER_LIMIT = "over_limit"
"""Name of the detail that marks a response which its verifier could not decide within its limits."""


class RewardPart(msgspec.Struct, frozen=True):
    """The keys of a [reward.part.NAME]."""

    verifier: str = ""
    weight: float = 1.0
    gate: str = ""
    gate_above: float = 0.0


class RewardRules(msgspec.Struct, frozen=True):
    """Settings shared by all items of a run; mostly keys of [reward]."""

    timeout_s: float = 10.0
    verifiers: tuple[str, ...] = ()
    """Verifiers that a process loads before its first item, because imports may take longer than an item may."""
    memory_mb: int = 4096
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    max_response_tokens: int = 0
    """Longest response of the run (tokens)."""
    format_pattern: str = ""
    format_penalty: float = 0.0
    url: str = ""
    """Address of the remote reward model."""
    url_key_variable: str = ""
    """Name of the environment variable with the reward model's key; "" if it wants none."""
    code_test_s: float = 4.0
    code_memory_mb: int = 1024
    over_limit: str = "wrong"
    """Outcome of a response that its verifier cannot decide within its limits: "failed" (no reward) or "wrong"."""
    has_sessions: bool = False
    """Whether responses are sessions of agents, to which verifiers give no token scores."""
    name: str = ""
    """The run's verifier (`reward.name`). Only its responses have a reward composed of `parts`."""
    parts: dict[str, RewardPart] = {}
    feedback: int = 0
    """Longest feedback of a verifier that is kept (characters); 0 keeps none, as where the run's algorithm does not
    show feedback to the policy."""
    traced: bool = False
    """Whether error texts contain the whole traceback."""


class Undecided(RuntimeError):
    """A verifier cannot decide a response within its limits; the cause is the response, not the verifier."""


class Item(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One response to verify, as sent to a verifier process."""

    key: int
    verifier: str
    response: str
    label: str
    finish_reason: str
    prompt: str = ""
    tokens: int = 0
    """Length of the response (tokens)."""
    state: bytes = b""
    """Final state of the response's environment, MessagePack; empty without an environment."""
    timeouts: int = 0
    """How often the item has exceeded the time limit so far."""
    row_prompt: str = ""
    """The prompt as the row has it, JSON: a text or chat messages. Empty where it is unknown or unused."""
    turns: int = 0
    """Number of turns that the policy has taken in the response; 0 if unknown."""
    budget: int = 0
    """Most tokens of this response; 0: the run's `max_response_tokens`. The overlong penalty's buffer ends at this
    budget."""


class GroupItem(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All responses of a group, for a verifier that scores them together."""

    key: int
    verifier: str
    items: list[Item]
    timeouts: int = 0


class Score(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The reward of an item, or the error why an item or group has none."""

    key: int
    reward: float | None
    error: str | None = None
    details: dict[str, float] = {}
    """Named numbers that a verifier returns in addition to the reward, such as its parts."""
    token_scores: dict[str, bytes] = {}
    """Named columns that a verifier returns beside the reward, float32: a number for each token of the response, or for
    each turn."""
    feedback: str = ""
    """Text that a verifier gives in addition to the reward; "" for none."""
    forks: list[dict[str, bytes]] = []
    """For an agent's session, in place of `token_scores`: the columns of each fork that a teacher has scored."""


class GroupScore(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The rewards of a group's items, in their order."""

    key: int
    scores: list[Score]
    forks: list[dict[str, bytes]] = []
    """For agents' sessions: the columns of each fork that a teacher has scored, session by session."""


def feedback_in(given: Mapping[str, Any]) -> str:
    """The text that a verifier gives under the name `feedback`; "" without one. Raises TypeError for a value that is
    neither text nor a number; a number is a detail like others."""
    said = given.get(FEEDBACK)
    if not (said is None or isinstance(said, str | Real)):
        raise TypeError(f"gave feedback {said!r:.80}, which is no text; give text, or leave it out")
    return said if isinstance(said, str) else ""


BatchVerifier = Callable[[list[Item], RewardRules], list[Score]]
"""A verifier that scores several items in one call, with access to the run's rules."""


AnyVerifier = TypeVar("AnyVerifier", bound=Callable[..., Any])


def right_or_wrong(verifier: AnyVerifier) -> AnyVerifier:
    """Decorator that marks a verifier whose reward is 1 for a right response and 0 for a wrong one; its scores get the
    detail `correct`."""
    vars(verifier)["right_or_wrong"] = True
    return verifier


def takes_items(verifier: BatchVerifier) -> BatchVerifier:
    """Decorator that marks a `BatchVerifier`; other verifiers take the parameters of a single response."""
    vars(verifier)["takes_items"] = True
    return verifier
