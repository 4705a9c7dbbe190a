"""Verifiers by name: what a response is worth.

A verifier is a function `(response, label, finish_reason)` that returns a number, or a number and a dictionary of
numbers that it is made of. If it has a parameter `prompt`, `tokens` or `state` (of its environment), it is given that,
too. One of your own is named by where it lives, `package.module:function`; it may raise, and an exception is never
counted as a reward of zero.

A name that begins with `group:` is that of a function `(responses, label, finish_reasons)` of your own, which sees all
responses to a prompt and returns as many such results; its `tokens` are a list. `group:remote` has a reward model see
them in one request.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache

import msgspec

from april.data.rows import GROUP_REWARD
from april.workers.rewards.messages import Item, RewardRules, Score

Verifier = Callable[..., float | tuple[float, dict[str, float]]]
BatchVerifier = Callable[[list[Item], RewardRules], list[Score]]
"""one with the attribute `takes_items`: scores several at once, and knows the run's rules"""

PACKAGE = "april.workers.rewards"
VERIFIERS = {
    "final_answer": f"{PACKAGE}.text:final_answer",
    "exact": f"{PACKAGE}.text:exact",
    "regex": f"{PACKAGE}.text:regex",
    "f1": f"{PACKAGE}.text:f1",
    "choice": f"{PACKAGE}.text:choice",
    "math": f"{PACKAGE}.mathematics:math",
    "deepscaler": f"{PACKAGE}.mathematics:deepscaler",
    "dapo": f"{PACKAGE}.mathematics:dapo",
    "code": f"{PACKAGE}.code:code",
    "remote": f"{PACKAGE}.remote:remote",
    "environment": "april.environments.reward:environment",
}
NEEDED = {"math": "math_verify", "deepscaler": "math_verify"}
"""module of the `rewards` extra that a verifier imports when it is first used"""
IN_BATCHES = {"remote"}
"""of which a process takes many at a time"""
FURTHER = ("prompt", "tokens", "state")
"""parameters that a verifier may have"""


@cache
def find_verifier(name: str) -> BatchVerifier:
    """The verifier as one that scores items. Raises LookupError, ImportError or AttributeError for a name that leads
    nowhere."""
    of_group, name = name.startswith(GROUP_REWARD), name.removeprefix(GROUP_REWARD)
    if of_group and name in VERIFIERS and name not in IN_BATCHES:
        raise LookupError(f"{name} sees one response at a time")
    if ":" not in name:
        name = VERIFIERS[name]
    module, _, function = name.partition(":")
    verifier = getattr(importlib.import_module(module), function)
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


def together(verifier: Verifier, items: list[Item], further: list[str]) -> list[Score]:
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


def check_verifier(name: str, key: str = "reward.name", url: str = "") -> None:
    """Raises ConfigError unless the verifier can be found and has what it needs; `key` is where the name was given."""
    from april.config import ConfigError

    try:
        find_verifier(name)
    except (LookupError, ImportError, AttributeError, ValueError) as error:
        reason = "" if isinstance(error, KeyError) else f" ({error})"
        raise ConfigError(
            f"key {key!r} = {name!r} is no verifier{reason}; use one of {', '.join(map(repr, VERIFIERS))} "
            "or name your own as package.module:function, or group:package.module:function"
        ) from None
    name = name.removeprefix(GROUP_REWARD)
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        raise ConfigError(
            f"key {key!r} = {name!r} needs {NEEDED[name].replace('_', '-')}, which is not installed; "
            "`pip install 'april-rl[rewards]'`"
        )
    if name == "remote" and not url:
        raise ConfigError(f"key {key!r} = 'remote' has no server; set reward.url to its address")
