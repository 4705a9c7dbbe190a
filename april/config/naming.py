"""What a configuration refers to by name: parts that ship with April or are the user's own, and paths, which are made
absolute."""

import os
from pathlib import Path
from typing import Any, get_args, get_origin

from april.config.section import NAME_OR_FILE, Section
from april.config.sections import Config
from april.util.registry import registry_of


def part_names(config: Config, key: str) -> list[str]:
    """Names of the parts that a configuration key (section.field) refers to: none for an empty value, several for a
    list."""
    section, _, field = key.partition(".")
    value = getattr(getattr(config, section), field)
    return ([value] if value else []) if isinstance(value, str) else list(value)


def is_shipped(config: Config, key: str) -> bool:
    return set(part_names(config, key)) <= registry_of(key).shipped.keys()


def shipped_part(config: Config, key: str) -> Any:
    """The shipped part that a configuration key names; None if the key names a user-defined part, which is not imported
    here."""
    return registry_of(key).find(part_names(config, key)[0]) if is_shipped(config, key) else None


# --- paths ------------------------------------------------------------------------------------------------------------


def make_paths_absolute(tree: Any, folder: Path, model: type[Section] = Config) -> None:
    """Make the paths in `tree`, the keys of a `model`, absolute in place; they are relative to `folder`."""
    for name, field in model.model_fields.items() if isinstance(tree, dict) else ():
        value, kinds = tree.get(name), (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if inner:
            by_name = isinstance(value, dict) and get_origin(field.annotation) is dict
            for part in value if isinstance(value, list) else value.values() if by_name else [value]:
                make_paths_absolute(part, folder, inner)
        elif isinstance(value, list) and Path in kinds:
            tree[name] = [absolute_path(item, folder) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str) and (Path in kinds or (NAME_OR_FILE in field.metadata and Path(value).suffix)):
            tree[name] = absolute_path(value, folder)


def absolute_path(path: str, folder: Path) -> str:
    """The absolute path. Links are kept: a Python interpreter finds its packages by the path it is called by."""
    return os.path.normpath(folder.resolve() / os.path.expanduser(path)) if path else path
