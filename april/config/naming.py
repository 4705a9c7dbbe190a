"""The parts that a configuration names: which, and whether they ship with April."""

from typing import Any

from april.config.sections import Config
from april.registry import registry_of


def names_at(config: Config, key: str) -> list[str]:
    """The parts that a key names: none, one, or as many as its list has."""
    section, _, field = key.partition(".")
    value = getattr(getattr(config, section), field)
    return ([value] if value else []) if isinstance(value, str) else list(value)


def is_shipped(config: Config, key: str) -> bool:
    return set(names_at(config, key)) <= registry_of(key).shipped.keys()


def shipped(config: Config, key: str) -> Any:
    """The part that a key names, None of one's own."""
    return registry_of(key).find(names_at(config, key)[0]) if is_shipped(config, key) else None
