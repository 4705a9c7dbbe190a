"""Verifiers by name: what a response is worth.

A verifier is a function `(response, label, finish_reason)` that returns a number, or a number and a dictionary of
numbers that it is made of. If it has a parameter `prompt`, `tokens` or `state` (of its environment), it is given that,
too. One of your own is named by where it lives, `package.module:function`; it may raise, and an exception is never
counted as a reward of zero.

A name that begins with `group:` is that of a function `(responses, label, finish_reasons)` of your own, which sees all
responses to a prompt and returns as many such results; its `tokens` are a list. `group:remote` has a reward model see
them in one request.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from april.data.rows import GROUP_REWARD
from april.errors import ConfigError
from april.workers.rewards import VERIFIERS
from april.workers.rewards.messages import BatchVerifier, Item, RewardRules, Score

Worth = float | tuple[float, dict[str, float]]
Verifier = Callable[..., Worth]

FURTHER = ("prompt", "tokens", "state")
"""parameters that a verifier may have"""


@cache
def find_verifier(name: str) -> BatchVerifier:
    """The verifier as one that scores items. Raises ConfigError for a name that leads nowhere, LookupError for one of a
    group that sees one response at a time."""
    verifier = VERIFIERS.find(name)
    of_group, bare = name.startswith(GROUP_REWARD), name.removeprefix(GROUP_REWARD)
    if of_group and bare in VERIFIERS.shipped and not getattr(verifier, "in_batches", False):
        raise LookupError(f"{bare} sees one response at a time")
    if getattr(verifier, "takes_items", False):
        return verifier
    further = [parameter for parameter in FURTHER if parameter in parameters(verifier)]

    def score(items: list[Item], rules: RewardRules) -> list[Score]:
        return [one(verifier, item, further) for item in items]

    def score_group(items: list[Item], rules: RewardRules) -> list[Score]:
        return together(verifier, items, further)

    return score_group if of_group else score


def parameters(verifier: Verifier) -> list[str]:
    try:
        return list(inspect.signature(verifier).parameters)
    except (TypeError, ValueError):
        return []


def one(verifier: Verifier, item: Item, further: list[str]) -> Score:
    more = {name: getattr(item, name) for name in further}
    if "state" in more:
        more["state"] = msgspec.msgpack.decode(item.state) if item.state else None
    return score_from(item, verifier(item.response, item.label, item.finish_reason, **more))


def together(verifier: Callable[..., Sequence[Worth]], items: list[Item], further: list[str]) -> list[Score]:
    """What a verifier says of all responses to a prompt. Raises ValueError unless it says as much as there is."""
    more = {"prompt": items[0].prompt, "tokens": [item.tokens for item in items]}
    worths = verifier(
        [item.response for item in items],
        items[0].label,
        [item.finish_reason for item in items],
        **{name: more[name] for name in further if name in more},
    )
    if len(worths) != len(items):
        raise ValueError(f"returned {len(worths)} rewards for {len(items)} responses")
    return [score_from(item, worth) for item, worth in zip(items, worths, strict=True)]


def score_from(item: Item, worth) -> Score:
    reward, details = worth if isinstance(worth, tuple) and len(worth) == 2 else (worth, {})
    return Score(item.key, reward, None, details)


@cache
def in_batches(name: str) -> bool:
    """Whether a verifier process takes many items for it at a time. One of somebody's own is not imported for this."""
    return name in VERIFIERS.shipped and getattr(VERIFIERS.find(name), "in_batches", False)


def check_verifier(name: str, key: str = "", url: str = "") -> None:
    """Raises ConfigError unless the verifier can be found and has what it needs; `key` is where the name was given."""
    key, verifier = key or VERIFIERS.key, VERIFIERS.find(name, key)
    try:
        find_verifier(name)
    except LookupError as error:
        raise ConfigError(
            f"key {key!r} = {name!r} is no verifier of groups ({error}); name your own as group:package.module:function"
        ) from None
    needed = getattr(verifier, "needs", "")
    if needed and importlib.util.find_spec(needed) is None:
        raise ConfigError(
            f"key {key!r} = {name!r} needs {needed.replace('_', '-')}, which is not installed; "
            "`pip install 'april-rl[rewards]'`"
        )
    if getattr(verifier, "asks_a_server", False) and not url:
        raise ConfigError(f"key {key!r} = {name!r} has no server; set reward.url to its address")
