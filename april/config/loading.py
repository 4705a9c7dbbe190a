"""Configuration files and overrides become a validated `Config`, or one sentence that says what to mend."""

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
    """Read TOML files, a later one over those before it, apply `--section.key value` overrides, validate, and check
    that parts fit together. `inputs`: which of model and data have to be there, too. Paths become absolute."""
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    tree: dict[str, Any] = {"run": {"dir": str(RunSection.model_fields["dir"].default)}}
    folders: list[str] = []
    for one in paths:
        merge(tree, of_file := read_tree(one))
        run = of_file.get("run")
        folders += [] if isinstance(run, dict) and "parts" in run else [str(one.parent.resolve())]
    for key, value in parse_overrides(list(overrides)):
        set_key(tree, key, value)
    anchor(tree, Path.cwd())
    add_folders(tree, folders)
    if len(paths) > 1 and isinstance(tree.setdefault("run", {}), dict):
        tree["run"].setdefault("name", "-".join(one.stem for one in paths[1:]))
    config = validate(tree)
    check(config, inputs)
    return config


def add_folders(tree: dict[str, Any], folders: list[str]) -> None:
    """To those where parts of one's own are found, which a run's own config.toml has all of."""
    run = tree["run"]
    if isinstance(run, dict) and isinstance(parts := run.get("parts", []), list):
        run["parts"] = list(dict.fromkeys([*map(str, parts), *folders]))


def read_tree(path: Path) -> dict[str, Any]:
    """A file's keys, its paths as they are meant from where it lies."""
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
    """Lay `other` over the tree, key by key."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


def validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentence(error.errors()[0])) from None


def likely_key(key: str, known: Collection[str]) -> str | None:
    """One that differs by a letter or two; the key of that last name, if there is one alone; what another trainer calls
    so; or the most similar."""
    if nearly := difflib.get_close_matches(key, known, n=1, cutoff=0.92):
        return nearly[0]
    last = key.rpartition(".")[2]
    of_that_name = [other for other in known if other.rpartition(".")[2] == last]
    if len(of_that_name) == 1:
        return of_that_name[0]
    if (meant := SYNONYMS.get(last)) in known:
        return meant
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.5)), None)


def sentence(error: ErrorDetails, model: type[Section] = Config, listing: str = "`april run --help`") -> str:
    """One sentence from a pydantic error of `model`, whose keys `listing` lists: the key, the value, what was
    expected."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        meant = likely_key(key, known_keys(model))
        mend = f"did you mean {meant!r}?" if meant else f"{listing} lists the keys"
        return f"unknown key {key!r} = {error['input']!r}; {mend}"
    if error["type"] == "missing":
        key = {"model": "model.path", "data": "data.path"}.get(key, key)
        return f"key {key!r} is missing; set it in the file or with --{key} VALUE"
    if error["type"] == "model_type":
        return f"key {key!r} = {error['input']!r} is refused: it is a section; write its keys under [{key}]"
    expected = re.sub(r"^\w+ should ", "should ", error["msg"])
    return f"key {key!r} = {error['input']!r} is refused: it {expected}; mend it in the file or with --{key} VALUE"
