"""The options of a framework's script as values, and the reasons why some cannot be read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from april.convert.expansion import Word
from april.convert.shell import UNKNOWN_ELEMENTS, Invocation, Script
from april.errors import ConfigError

HYDRA = re.compile(r"(\+{0,2})([\w./@-]+)=(.*)", re.DOTALL)
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Options:
    """Options by the framework's names."""

    values: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reasons why options cannot be read, by name, or by the text in place of a name."""
    kind: str = ""
    """The configuration class that the script uses, where the framework has several."""


def script_options(text: str, environment: Mapping[str, str], program: str, hydra: bool = False) -> Options:
    """The options of the one command that calls `program`, a regular expression for the end of its name. `hydra`: they
    are KEY=VALUE overrides. Raises ConfigError."""
    script = Script.read(text, environment)
    words = launch_arguments(script.invocations, program)
    options = hydra_overrides(words) if hydra else flags(words)
    return options if hydra else with_unused_arrays(options, script, words)


def with_unused_arrays(options: Options, script: Script, words: Sequence[Word]) -> Options:
    """The options, with a note on arrays of flags that the script sets and never passes to the program."""
    arguments = {word.text for word in words}
    for name, value in script.variables.items():
        array_flags = [word.text for word in value if word.text.startswith("--")] if isinstance(value, list) else []
        if array_flags and not arguments & set(array_flags):
            options.unreadable[name] = f"the script sets it and never gives it to the program: {' '.join(array_flags)}"
    return options


def launch_arguments(invocations: Sequence[Invocation], program: str) -> list[Word]:
    """The arguments of the program. Raises ConfigError if no command calls it, or more than one."""
    pattern = re.compile(rf"(?:.*[/.\s]|^)(?:{program})")
    matches = [
        (command.line, command.words[index + 1 :])
        for command in invocations
        for index, word in enumerate(command.words)
        if pattern.fullmatch(word.text)
    ]
    if len(matches) != 1:
        lines = " and ".join(str(line) for line, _ in matches)
        raise ConfigError(
            f"lines {lines} of the script may both start its trainer; decide their conditions with --set NAME=VALUE"
            if matches
            else f"the script calls no program like {program.replace(chr(92), '')}; give one that starts a run"
        )
    return matches[0][1]


def flags(words: Sequence[Word]) -> Options:
    """Options of the forms `--name value`, `--name=value` and `--name`; the last one of a name wins."""
    options, name, arguments = Options(), "", dict[str, list[Word]]()
    for word in words:
        if word.text.startswith("--") and not word.unreadable:
            name, has_value, value = word.text[2:].partition("=")
            arguments[name] = [Word(value)] if has_value else []
        elif name and UNKNOWN_ELEMENTS not in word.text:
            arguments[name].append(word)
        else:
            options.unreadable[word.text] = word.unreadable or "it belongs to no option"
    for name, values in arguments.items():
        if why := next((word.unreadable for word in values if word.unreadable), ""):
            options.unreadable[name] = why
        else:
            read = [scalar(word.text) for word in values]
            options.values[name] = True if not read else read[0] if len(read) == 1 else read
    return options


def hydra_overrides(words: Sequence[Word]) -> Options:
    """Options of the form `key=value`, with up to two `+` before it."""
    options = Options()
    for word in words:
        match = HYDRA.fullmatch(word.text)
        if word.unreadable or not match:
            name = match[2] if match else word.text
            options.unreadable[name] = word.unreadable or "it is no KEY=VALUE"
        else:
            options.values[match[2]] = scalar(match[3])
    return options


def file_options(text: str, path: Path) -> Options:
    """The options of a YAML file. Raises ConfigError."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} is not YAML ({error}); mend it") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} holds no options; give a YAML file of names and values")
    values = {name: scalar(value) if isinstance(value, str) else value for name, value in flatten(tree).items()}
    unreadable = {
        name: "another option's value, which is not read" for name, value in values.items() if "${" in str(value)
    }
    return Options({name: value for name, value in values.items() if name not in unreadable}, unreadable)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their dotted names."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def scalar(text: str) -> Any:
    """The text as a number, bool, None or list if it is one; otherwise the text itself."""
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
