"""Which parts a configuration names, and whether they ship with April or are the user's own."""

from typing import Any

from april.config.sections import Config
from april.registry import registry_of


def part_names(config: Config, key: str) -> list[str]:
    """Names of the parts at a key of the form section.field: none for an empty value, several for a list."""
    section, _, field = key.partition(".")
    value = getattr(getattr(config, section), field)
    return ([value] if value else []) if isinstance(value, str) else list(value)


def is_shipped(config: Config, key: str) -> bool:
    return set(part_names(config, key)) <= registry_of(key).shipped.keys()


def shipped_part(config: Config, key: str) -> Any:
    """The part that a key names; None if it is the user's own, which is not imported here."""
    return registry_of(key).find(part_names(config, key)[0]) if is_shipped(config, key) else None
