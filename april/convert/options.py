"""The options that a framework's script gives, as values; and what of them could not be read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from april.convert.expansion import Word
from april.convert.shell import WHOLE_ARRAY, Called, Script
from april.errors import ConfigError

HYDRA = re.compile(r"(\+{0,2})([\w./@-]+)=(.*)", re.DOTALL)
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Options:
    """By name, as the framework calls them."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    """why, by name, or by what stands in its place"""
    kind: str = ""
    """which of its configurations a framework was given, where it has several"""


def of_script(text: str, environment: Mapping[str, str], program: str, hydra: bool = False) -> Options:
    """The options of the one command that calls `program`, a regular expression for the end of its name."""
    script = Script.read(text, environment)
    words = launch(script.called, program)
    options = hydra_overrides(words) if hydra else flags(words)
    return options if hydra else options_beside(options, script, words)


def options_beside(options: Options, script: Script, words: Sequence[Word]) -> Options:
    """With a word on arrays of flags that the script sets, and never gives to the program."""
    given = {word.text for word in words}
    for name, value in script.variables.items():
        own = [word.text for word in value if word.text.startswith("--")] if isinstance(value, list) else []
        if own and not given & set(own):
            options.unread[name] = f"the script sets it and never gives it to the program: {' '.join(own)}"
    return options


def launch(called: Sequence[Called], program: str) -> list[Word]:
    """The words behind the program's name. Raises ConfigError where no command calls it, or more than one."""
    pattern = re.compile(rf"(?:.*[/.\s]|^)(?:{program})")
    found = [
        (command.line, command.words[index + 1 :])
        for command in called
        for index, word in enumerate(command.words)
        if pattern.fullmatch(word.text)
    ]
    if len(found) != 1:
        lines = " and ".join(str(line) for line, _ in found)
        raise ConfigError(
            f"lines {lines} of the script may both start its trainer; decide their conditions with --set NAME=VALUE"
            if found
            else f"the script calls no program like {program.replace(chr(92), '')}; give one that starts a run"
        )
    return found[0][1]


def flags(words: Sequence[Word]) -> Options:
    """`--name value`, `--name=value`, `--name` alone; a later one wins."""
    options, name, given = Options(), "", dict[str, list[Word]]()
    for word in words:
        if word.text.startswith("--") and not word.unread:
            name, has_value, value = word.text[2:].partition("=")
            given[name] = [Word(value)] if has_value else []
        elif name and WHOLE_ARRAY not in word.text:
            given[name].append(word)
        else:
            options.unread[word.text] = word.unread or "it belongs to no option"
    for name, values in given.items():
        if why := next((word.unread for word in values if word.unread), ""):
            options.unread[name] = why
        else:
            read = [scalar(word.text) for word in values]
            options.values[name] = True if not read else read[0] if len(read) == 1 else read
    return options


def hydra_overrides(words: Sequence[Word]) -> Options:
    """`key=value`, with or without `+` before it."""
    options = Options()
    for word in words:
        found = HYDRA.fullmatch(word.text)
        if word.unread or not found:
            name = found[2] if found else word.text
            options.unread[name] = word.unread or "it is no KEY=VALUE"
        else:
            options.values[found[2]] = scalar(found[3])
    return options


def of_file(text: str, path: Path) -> Options:
    """Of a YAML file. Raises ConfigError."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} is not YAML ({error}); mend it") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} holds no options; give a YAML file of names and values")
    values = {name: scalar(value) if isinstance(value, str) else value for name, value in flat(tree).items()}
    unread = {name: "another option's value, which is not read" for name, value in values.items() if "${" in str(value)}
    return Options({name: value for name, value in values.items() if name not in unread}, unread)


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Of nested tables, with the names of their sections joined by dots."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return values


def scalar(text: str) -> Any:
    """A number, a truth, nothing, or a list where the text is one; otherwise the text."""
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none", "~"):
        return None
    if text[:1] == "[":
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    return text
