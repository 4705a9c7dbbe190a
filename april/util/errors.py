"""`ConfigError`, an error for the user to fix, `refuse` and `refuse_for`, which raise it with a uniform sentence, and
`NotTried`."""

from pathlib import Path
from typing import Any, NoReturn

from april.util.text import masked


class ConfigError(ValueError):
    """A configuration or a command line that cannot work. Its text is one sentence that names key, value and fix."""


class NotTried(RuntimeError):
    """A check before a run could not be made on this machine; the text says which check, and why."""


def refuse(key: str, value: Any, why: str, fix: str, cause: BaseException | None = None) -> NoReturn:
    """Raise the ConfigError `key 'KEY' = VALUE WHY; FIX`.

    `key` is a key of the configuration, or an option of the command line with its dashes. Secrets in `value` are
    masked; a `value` of None is left out. `why` is the rest of a sentence, whose subject is the key; `fix` is an
    imperative. `cause`: the exception from which the ConfigError is raised.

        refuse("broker.renew_s", 60.0, "is not below broker.lease_s = 60.0", "lower it")
    """
    raise ConfigError(f"{assignment(key, value)} {why}; {fix}") from cause


def refuse_for(key: str, value: Any, why: str, error: object) -> NoReturn:
    """Raise the ConfigError `key 'KEY' = VALUE WHY: ERROR`, for an error whose own text says what to do."""
    raise ConfigError(f"{assignment(key, value)} {why}: {error}") from None


def assignment(key: str, value: Any) -> str:
    """The beginning of an error's sentence: `key 'KEY' = VALUE`, or `option '--KEY' = VALUE`, with secrets masked;
    without ` = VALUE` if `value` is None."""
    subject = f"{'option' if key.startswith('--') else 'key'} {key!r}"
    return subject if value is None else f"{subject} = {toml_like(masked(value, key))}"


def toml_like(value: Any) -> str:
    """A value as text, nearly as a TOML configuration file spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(str(value) if isinstance(value, Path) else value)
