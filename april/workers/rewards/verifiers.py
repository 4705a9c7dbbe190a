"""Verifiers by name: what a response is worth.

A verifier is a function of `response`, `label`, `finish_reason`, `prompt`, `tokens` and `state` (of its environment),
or of those of them that it has as parameters, in any order. It returns a number, or a number and a dictionary of
numbers that it is made of. One of your own is named by where it lives, `package.module:function`; it may raise, and an
exception is never counted as a reward of zero.

A name that begins with `group:` is that of a function of your own of `responses`, `label`, `finish_reasons`, `prompt`,
`tokens` and `states`, which sees all responses to a prompt and returns as many such results; `tokens` are a list, too.
`group:remote` has a reward model see them in one request. `interfaces.py` has the names of other frameworks' functions.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec

from april.data.rows import GROUP_REWARD
from april.errors import ConfigError
from april.workers.rewards import VERIFIERS
from april.workers.rewards.interfaces import INTERFACES, adapted
from april.workers.rewards.messages import BatchVerifier, Item, RewardRules, Score

Worth = float | tuple[float, dict[str, float]]
Verifier = Callable[..., Worth]

PARAMETERS = ("response", "label", "finish_reason", "prompt", "tokens", "state")
"""that a verifier may have; one with other names for the first three is given these by their places"""
OF_GROUP = ("responses", "label", "finish_reasons", "prompt", "tokens", "states")
"""that one of a group may have"""
BY_PLACE = 3


@cache
def find_verifier(name: str) -> BatchVerifier:
    """The verifier as one that scores items. Raises ConfigError for a name that leads nowhere, LookupError for one of a
    group that sees one response at a time."""
    verifier = VERIFIERS.find(name)
    of_group, bare = name.startswith(GROUP_REWARD), VERIFIERS.bare(name)
    if prefix := interface_of(name):
        verifier = adapted(verifier, prefix, of_group)
    elif of_group and bare in VERIFIERS.shipped and not getattr(verifier, "in_batches", False):
        raise LookupError(f"{bare} sees one response at a time; name your own as group:package.module:function")
    if getattr(verifier, "takes_items", False):
        return verifier
    call = matched(verifier, OF_GROUP if of_group else PARAMETERS)

    def score(items: list[Item], rules: RewardRules) -> list[Score]:
        return [score_from(item, call(given(item))) for item in items]

    def score_group(items: list[Item], rules: RewardRules) -> list[Score]:
        return together(call, items)

    return score_group if of_group else score


def interface_of(name: str) -> str:
    """What stands before the name of a function that another framework calls; empty for April's own."""
    return next((prefix for prefix in INTERFACES if name.removeprefix(GROUP_REWARD).startswith(prefix)), "")


def matched(verifier: Verifier, known: Sequence[str]) -> Callable[[dict[str, Any]], Any]:
    """What calls the verifier with those of the `known` arguments that it has parameters for. Raises LookupError for
    one that needs others."""
    by_place, by_name = places_and_names(verifier, known)

    def call(arguments: dict[str, Any]) -> Any:
        return verifier(*(arguments[name] for name in by_place), **{name: arguments[name] for name in by_name})

    return call


def places_and_names(verifier: Verifier, known: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    try:
        parameters = inspect.signature(verifier).parameters.values()
    except (TypeError, ValueError):
        return known[:BY_PLACE], []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        only_by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        return known[: len(only_by_place)], list(known[len(only_by_place) :])
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.name in known and p.kind is not p.POSITIONAL_ONLY]
    first = positional[:BY_PLACE]
    foreign = len(first) == BY_PLACE and all(
        p.default is p.empty and (p.name not in known or p.name == place)
        for p, place in zip(first, known, strict=False)
    )
    if foreign or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return known[:BY_PLACE], [name for name in named if name not in known[:BY_PLACE]]
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in named]
    if needed:
        raise LookupError(f"its parameter {needed[0]!r} is none of {', '.join(known)}; rename it, or give it a default")
    return [], named


def given(item: Item) -> dict[str, Any]:
    return {name: getattr(item, name) for name in PARAMETERS} | {"state": state_of(item)}


def state_of(item: Item) -> Any:
    """That its environment has left it in; None without one."""
    return msgspec.msgpack.decode(item.state) if item.state else None


def together(call: Callable[[dict[str, Any]], Sequence[Worth]], items: list[Item]) -> list[Score]:
    """What a verifier says of all responses to a prompt. Raises ValueError unless it says as much as there is."""
    worths = call(
        {
            "responses": [item.response for item in items],
            "label": items[0].label,
            "finish_reasons": [item.finish_reason for item in items],
            "prompt": items[0].prompt,
            "tokens": [item.tokens for item in items],
            "states": [state_of(item) for item in items],
        }
    )
    if len(worths) != len(items):
        raise ValueError(f"returned {len(worths)} rewards for {len(items)} responses")
    return [score_from(item, worth) for item, worth in zip(items, worths, strict=True)]


def score_from(item: Item, worth) -> Score:
    reward, details = worth if isinstance(worth, tuple) and len(worth) == 2 else (worth, {})
    return Score(item.key, reward, None, details)


def right_response(name: str) -> Callable[[str], str] | None:
    """How a right response to a label reads, where the verifier has an `example` of that: what it is tried on."""
    return getattr(VERIFIERS.find(name), "example", None)


def reads_state(name: str) -> bool:
    """Whether it says something else of another state of the environment."""
    verifier = VERIFIERS.find(name)
    if interface_of(name):
        return False
    try:
        asks = {"state", "states"} & inspect.signature(verifier).parameters.keys()
        return getattr(verifier, "reads_state", False) or bool(asks)
    except (TypeError, ValueError):
        return False


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
        raise ConfigError(f"key {key!r} = {name!r} cannot be used: {error}") from None
    needed = getattr(verifier, "needs", "")
    if needed and importlib.util.find_spec(needed) is None:
        raise ConfigError(
            f"key {key!r} = {name!r} needs {needed.replace('_', '-')}, which is not installed; "
            "`pip install 'april-rl[rewards]'`"
        )
    if getattr(verifier, "asks_a_server", False) and not url:
        raise ConfigError(f"key {key!r} = {name!r} has no server; set reward.url to its address")
