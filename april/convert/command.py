"""`april convert FRAMEWORK SCRIPT`: reads, translates, writes TOML, and holds it against April's own checks."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from april.config import ConfigError, known_keys, load
from april.config.overrides import parse_overrides
from april.convert import FRAMEWORKS
from april.convert.framework import Framework
from april.convert.translation import Translation

DIFFERS = 5
"""exit status where something that was said is not said by the configuration"""
HEADINGS = {
    "differs": "What April cannot say, so that a run will differ:",
    "open": "What was not understood, or has to be chosen:",
    "apart": "What there is nothing to say of; it changes nothing that is learned:",
}


def convert(name: str, script: Path, out: Path | None, given: Sequence[str], overrides: Sequence[str]) -> int:
    """Write what the script says to `out`, or to the terminal. `given`: variables as NAME=VALUE; `overrides`: keys that
    are chosen. Returns the exit status; raises ConfigError."""
    framework = FRAMEWORKS.find(name)()
    said = framework.translate(script, os.environ | settings(given))
    for key, value in parse_overrides(list(overrides)):
        said.choose(key, value)
    text = toml(said, f"april convert {name} {script.name}", framework)
    if out:
        out.write_text(text)
    else:
        print(text, end="")
    print(summary(said, out), file=sys.stderr)
    check(text)
    return DIFFERS if said.differs or said.open else 0


def settings(given: Iterable[str]) -> dict[str, str]:
    """Variables that a script finds set, from NAME=VALUE."""
    pairs = [one.partition("=") for one in given]
    if wrong := next((name for name, equals, _ in pairs if not (equals and name.isidentifier())), None):
        raise ConfigError(f"option '--set' = {wrong!r} is no NAME=VALUE; give the variable and its value")
    return {name: value for name, _, value in pairs}


def check(text: str) -> None:
    """Refuse what April refuses to read; whether model and data are there is the run's matter. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "converted.toml"
        path.write_text(text)
        load(path, inputs=())


def summary(said: Translation, out: Path | None) -> str:
    where = f"; its last lines say which: {out}" if out else "; its last lines say which"
    return (
        f"{len(said.keys)} keys are said; of the options {len(said.apart)} say nothing to April, {len(said.differs)} "
        f"cannot be said, {len(said.open)} are open{where}"
    )


def toml(said: Translation, command: str, framework: Framework) -> str:
    """The configuration, each key with the option that said it, and what was not said."""
    lines = [f"# By `{command}`. Options are those of {framework.source}."]
    sections: dict[str, list[str]] = {"": []}
    for key, (value, names) in sorted(said.keys.items(), key=lambda item: order(item[0])):
        section, _, name = key.rpartition(".")
        line = f"{name} = {written(value)}"
        sections.setdefault(section, []).append(f"{line:<42}  # {names}" if names else line)
    for section, keys in sections.items():
        lines += (["", f"[{section}]"] if section else [""] if keys else []) + keys
    for kind, heading in HEADINGS.items():
        if notes := by_reason(getattr(said, kind)):
            lines += ["", f"# {heading}"] + [f"#   {names}: {one_line(why)}" for why, names in notes.items()]
    return "\n".join(lines) + "\n"


def by_reason(notes: Mapping[str, str]) -> dict[str, str]:
    """The names that share a reason, in one line."""
    names: dict[str, str] = {}
    for name, why in notes.items():
        names[why] = f"{names[why]}, {one_line(name)}" if why in names else one_line(name)
    return names


def order(key: str) -> int:
    """As the configuration declares its keys; those within one that is a table stand where it does."""
    known = list(known_keys())
    return next((known.index(part) for part in (key, key.rpartition(".")[0]) if part in known), len(known))


def written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {written(one)}' for name, one in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def one_line(text: str) -> str:
    """A comment's part; of a long one its beginning."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} …"
