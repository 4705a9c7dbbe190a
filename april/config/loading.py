"""Loads a configuration: TOML files and overrides become a validated `Config`, or a ConfigError."""

import difflib
import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from april.config.checks import INPUTS, check
from april.config.overrides import known_keys, parse_overrides, set_key
from april.config.paths import anchor
from april.config.section import Section
from april.config.sections import Config, RunSection
from april.config.synonyms import SYNONYMS
from april.errors import ConfigError


def load(path: str | Path | Sequence[Path], overrides: Sequence[str] = (), inputs: Collection[str] = INPUTS) -> Config:
    """Read TOML files, later ones over earlier ones, apply `--section.key value` overrides, validate, and check that
    parts fit together. `inputs`: which of "model" and "data" must exist. Paths become absolute. Raises ConfigError."""
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(file) for file in path]
    tree: dict[str, Any] = {"run": {"dir": str(RunSection.model_fields["dir"].default)}}
    folders: list[str] = []
    for file in paths:
        merge(tree, keys := read_file(file))
        run = keys.get("run")
        folders += [] if isinstance(run, dict) and "parts" in run else [str(file.parent.resolve())]
    for key, value in parse_overrides(list(overrides)):
        set_key(tree, key, value)
    anchor(tree, Path.cwd())
    add_part_folders(tree, folders)
    if len(paths) > 1 and isinstance(tree.setdefault("run", {}), dict):
        tree["run"].setdefault("name", "-".join(file.stem for file in paths[1:]))
    config = validate(tree)
    check(config, inputs)
    return config


def add_part_folders(tree: dict[str, Any], folders: list[str]) -> None:
    """Add the folders of configuration files to `run.parts`, where Python modules of the user's own parts are found."""
    run = tree["run"]
    if isinstance(run, dict) and isinstance(parts := run.get("parts", []), list):
        run["parts"] = list(dict.fromkeys([*map(str, parts), *folders]))


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, with paths relative to its folder made absolute. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read ({error}); give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}; mend that line") from None
    anchor(tree, path.parent)
    return tree


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Merge `other` into `tree` key by key; values of `other` win."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


def validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(error_sentence(error.errors()[0])) from None


def likely_key(key: str, known: Collection[str]) -> str | None:
    """The known key that an unknown one most likely means, tried in this order: a typing error, the only key with the
    same last part, another trainer's name for a key, the most similar one. None if nothing is similar."""
    if typing_error := difflib.get_close_matches(key, known, n=1, cutoff=0.92):
        return typing_error[0]
    last = key.rpartition(".")[2]
    same_last_part = [other for other in known if other.rpartition(".")[2] == last]
    if len(same_last_part) == 1:
        return same_last_part[0]
    if (likely := SYNONYMS.get(last)) in known:
        return likely
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.5)), None)


def error_sentence(error: ErrorDetails, model: type[Section] = Config, listing: str = "`april run --help`") -> str:
    """A pydantic error of `model` as one sentence: key, value, expectation. `listing`: where the keys are listed."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        likely = likely_key(key, known_keys(model))
        fix = f"did you mean {likely!r}?" if likely else f"{listing} lists the keys"
        return f"unknown key {key!r} = {error['input']!r}; {fix}"
    if error["type"] == "missing":
        key = {"model": "model.path", "data": "data.path"}.get(key, key)
        return f"key {key!r} is missing; set it in the file or with --{key} VALUE"
    if error["type"] == "model_type":
        return f"key {key!r} = {error['input']!r} is refused: it is a section; write its keys under [{key}]"
    expected = re.sub(r"^\w+ should ", "should ", error["msg"])
    return f"key {key!r} = {error['input']!r} is refused: it {expected}; mend it in the file or with --{key} VALUE"
