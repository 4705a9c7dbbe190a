"""Verifiers: what a response is worth, by name.

A verifier is a function `(response, label, finish_reason) -> number`. One of your own is named by where it
lives, `package.module:function`; it may raise, and an exception is never counted as a reward of zero.
"""

import importlib
from collections.abc import Callable

Verifier = Callable[[str, str, str], float]


def final_answer(response: str, label: str, finish_reason: str) -> float:
    """1.0 iff the response ended by itself and what follows its first `#` is the label."""
    _, mark, answer = response.partition("#")
    return float(finish_reason == "stop" and mark == "#" and answer == label)


def exact(response: str, label: str, finish_reason: str) -> float:
    """1.0 iff the response ended by itself and is the label."""
    return float(finish_reason == "stop" and response == label)


VERIFIERS: dict[str, Verifier] = {verifier.__name__: verifier for verifier in (final_answer, exact)}


def find_verifier(name: str) -> Verifier:
    """Raises LookupError, ImportError or AttributeError for a name that leads nowhere."""
    module, colon, function = name.partition(":")
    return getattr(importlib.import_module(module), function) if colon else VERIFIERS[name]


def check_verifier(name: str, key: str = "reward.name") -> None:
    """Raises ConfigError unless the verifier can be found; `key` is where the name was given."""
    from april.config import ConfigError

    try:
        find_verifier(name)
    except (LookupError, ImportError, AttributeError, ValueError) as error:
        reason = "" if isinstance(error, KeyError) else f" ({error})"
        raise ConfigError(
            f"key {key!r} = {name!r} is no verifier{reason}; use one of {', '.join(map(repr, VERIFIERS))} "
            "or name your own as package.module:function"
        ) from None
