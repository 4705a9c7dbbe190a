"""Messages between a reward pool and its verifier processes."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

import msgspec

from april.wire.limits import FEEDBACK

OVER_LIMIT = "over_limit"
"""Name of the detail that marks a response which its verifier could not decide within its limits."""


class RewardPart(msgspec.Struct, frozen=True):
    """The keys of a [reward.part.NAME], one summand of the reward (`april.workers.rewards.parts`)."""

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
    """Maximum number of tokens of a response in this run."""
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
    """Whether responses are sessions of agents, which get no token scores (numbers for each token) from verifiers."""
    name: str = ""
    """The run's verifier (`reward.name`). Rewards are composed of `parts` only for responses that it scores; a row of
    the dataset may name another verifier."""
    parts: dict[str, RewardPart] = {}
    feedback: int = 0
    """Maximum number of characters kept of the text that a verifier gives beside a reward. 0 keeps none, as in a run
    whose algorithm does not show such text to the policy."""
    traced: bool = False
    """Whether the text of an error has the whole traceback, instead of the error's class and message."""


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
    """State that the environment returned last in this response, as MessagePack; empty without an environment."""
    timeouts: int = 0
    """How often a verifier process has exceeded the time limit with this item so far."""
    row_prompt: str = ""
    """The prompt as the dataset row has it, as JSON: a text or chat messages. Empty if it is unknown or the verifier
    does not use it."""
    turns: int = 0
    """Number of turns that the policy has taken in the response; 0 if unknown."""
    budget: int = 0
    """Maximum number of tokens of this response; 0 stands for the run's `max_response_tokens`. The overlong penalty
    reaches its full size at this length."""


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
    """Numbers that a verifier gives beside the reward, by name: float32 bytes, with one number for each token of the
    response or for each turn of the policy."""
    feedback: str = ""
    """Text that a verifier gives in addition to the reward; "" for none."""
    forks: list[dict[str, bytes]] = []
    """For an agent's session, in place of `token_scores`: for each fork (trajectory of the session) that a teacher has
    scored, its numbers by name, as float32 bytes."""


class GroupScore(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The rewards of a group's items, in their order."""

    key: int
    scores: list[Score]
    forks: list[dict[str, bytes]] = []
    """For agents' sessions: for each fork (trajectory of a session) that a teacher has scored, its numbers by name, as
    float32 bytes; the first session's forks come first."""


def feedback_in(given: Mapping[str, Any]) -> str:
    """The text that a verifier gives under the name `feedback`; "" if there is none, or if it is a number, which is a
    detail like others. Raises TypeError for any other value."""
    said = given.get(FEEDBACK)
    if not (said is None or isinstance(said, str | Real)):
        raise TypeError(f"gave feedback {said!r:.80}, which is no text; give text, or leave it out")
    return said if isinstance(said, str) else ""


BatchVerifier = Callable[[list[Item], RewardRules], list[Score]]
"""A verifier that scores several items in one call: function (items, the run's rules) -> a score for each item, in
order."""


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
