"""`april convert`: other frameworks' scripts as configurations."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.cli.command import command, option
from april.util.errors import refuse

if TYPE_CHECKING:
    from april.trainers.convert.framework import Framework
    from april.trainers.convert.translation import Translation

DIFFERS = 5
"""Exit status of a conversion in which an option of the script could not be translated, or still needs a decision."""
COMMENT_CHARACTERS = 200
HEADINGS = {
    "unsupported": "What April cannot say, so that a run will differ:",
    "undecided": "What was not understood, or has to be chosen:",
    "ignored": "What there is nothing to say of; it changes nothing that is learned:",
}


@command(
    option("framework", metavar="FRAMEWORK", help="Framework of the script: trl, verl, slime, openrlhf, or yours."),
    option("script", type=Path, metavar="SCRIPT", help="Shell script, Python script or YAML file that starts a run."),
    option("--out", type=Path, metavar="FILE", help="TOML file to write [default: print it]."),
    option(
        "--set",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Variable that the script reads from its environment; may be repeated.",
    ),
    overrides=True,
)
def convert(framework: str, script: Path, out: Path | None, variables: list[str], overrides: list[str]) -> int:
    """Translate another framework's script to a configuration of April's; --section.key VALUE sets keys left open."""
    from april.config.loading import parse_overrides
    from april.trainers.convert import FRAMEWORKS

    source = FRAMEWORKS.find(framework)()
    translation = source.translate(script, os.environ | parse_variables(variables))
    for key, value in parse_overrides(overrides):
        translation.override(key, value)
    text = toml(translation, f"april convert {framework} {script.name}", source)
    if out:
        out.write_text(text)
    else:
        print(text, end="")
    print(summary(translation, out), file=sys.stderr)
    check_loads(text)
    return DIFFERS if translation.unsupported or translation.undecided else 0


def parse_variables(variables: Iterable[str]) -> dict[str, str]:
    """Parse arguments of the form NAME=VALUE into values by name. Raises ConfigError."""
    pairs = [variable.partition("=") for variable in variables]
    if wrong := next((name for name, equals, _ in pairs if not (equals and name.isidentifier())), None):
        refuse("--set", wrong, "is no NAME=VALUE", "give the variable and its value")
    return {name: value for name, _, value in pairs}


def check_loads(text: str) -> None:
    """Refuse a converted configuration that April cannot load; files of model and data may be missing. Raises
    ConfigError."""
    from april.config import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "converted.toml"
        path.write_text(text)
        load(path, inputs=())


def summary(translation: "Translation", out: Path | None) -> str:
    where = f"; its last lines say which: {out}" if out else "; its last lines say which"
    return (
        f"{len(translation.keys)} keys are said; of the options {len(translation.ignored)} say nothing to April, "
        f"{len(translation.unsupported)} cannot be said, {len(translation.undecided)} are open{where}"
    )


def toml(translation: "Translation", command: str, framework: "Framework") -> str:
    """TOML text of a converted configuration: each key with the script's options that it comes from, then the
    untranslated options. `command`: the command line that converts, for the first line."""
    lines = [f"# By `{command}`. Options are those of {framework.source}."]
    sections: dict[str, list[str]] = {"": []}
    for key, (value, options) in sorted(translation.keys.items(), key=lambda item: declaration_order(item[0])):
        section, _, name = key.rpartition(".")
        line = f"{name} = {toml_value(value)}"
        sections.setdefault(section, []).append(f"{line:<42}  # {options}" if options else line)
    for section, keys in sections.items():
        lines += (["", f"[{section}]"] if section else [""] if keys else []) + keys
    for kind, heading in HEADINGS.items():
        if notes := names_by_reason(getattr(translation, kind)):
            lines += ["", f"# {heading}"] + [f"#   {names}: {one_line(why)}" for why, names in notes.items()]
    return "\n".join(lines) + "\n"


def names_by_reason(notes: Mapping[str, str]) -> dict[str, str]:
    """For each reason, the names of all options that have it, joined by commas. `notes`: reason by name of the
    option."""
    names: dict[str, str] = {}
    for name, why in notes.items():
        names[why] = f"{names[why]}, {one_line(name)}" if why in names else one_line(name)
    return names


def declaration_order(key: str) -> int:
    """Sort key: position of a configuration key, or of the table that it is in, in the declaration of the
    configuration."""
    from april.config import known_keys

    known = list(known_keys())
    return next((known.index(part) for part in (key, key.rpartition(".")[0]) if part in known), len(known))


def toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def one_line(text: str) -> str:
    """Text without line breaks, cut off after `COMMENT_CHARACTERS`."""
    line = " ".join(text.split())
    return line if len(line) <= COMMENT_CHARACTERS else f"{line[:COMMENT_CHARACTERS]} …"
