"""Overrides of keys on the command line, and the list of all keys in `--help`."""

import tomllib
from typing import Any, Literal, get_args, get_origin

from april.config.section import Section
from april.config.sections import Config
from april.errors import ConfigError, refuse

OVERRIDES = "every key of the configuration can be given as --section.key value:\n"

FLAGS = {
    "rollout-batch-size": "schedule.rollout_batch_size",
    "over-sampling-batch-size": "schedule.over_sampling_batch_size",
    "n-samples-per-prompt": "schedule.n_samples_per_prompt",
    "partial-rollout": "schedule.partial_rollout",
    "engine": "worker.engine",
}
"""Keys that have a short flag: those of the published method, and the worker's engine."""


def parse_overrides(arguments: list[str]) -> list[tuple[str, Any]]:
    """`--a.b value`, `--a.b=value`, and bare `--a.b` / `--no-a.b` for booleans -> [(key, value)]."""
    pairs, rest = [], list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ConfigError(f"argument {flag!r} is not an option; write overrides as --section.key value")
        name, has_value, text = flag[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            text, has_value = rest.pop(0), "="
        negated = name.startswith("no-") and not has_value
        name = name.removeprefix("no-") if negated else name
        key = FLAGS.get(name, name.replace("-", "_"))
        if (
            not has_value
            and (field := known_keys().get(key))
            and bool not in (field.annotation, *get_args(field.annotation))
        ):
            refuse(key, None, "has no value", f"write --{name} VALUE")
        pairs.append((key, parse_value(text) if has_value else not negated))
    return pairs


def parse_value(text: str) -> Any:
    """The TOML value that `text` is, or `text` itself if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            refuse(key, None, f"goes through {section!r}, which is not a section", "see `april run --help`")
    tree[name] = value


def known_keys(model: type[Section] = Config) -> dict[str, Any]:
    """Every `section.key` of a configuration with its pydantic field, in order of declaration."""
    keys = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            keys.update({f"{name}.{key}": inner for key, inner in section.model_fields.items()})
        else:
            keys[name] = field
    return keys


def shown_default(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def describe_keys() -> str:
    """The list of keys in `--help`: each with its help text, allowed values and default."""
    lines = []
    for key, field in known_keys().items():
        default = "required" if field.is_required() else f"default {shown_default(field.default)}"
        choices = "|".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ""
        choices = "true|false" if field.annotation is bool else choices
        lines.append(f"  --{key:38} {field.description} [{choices}{', ' if choices else ''}{default}]")
    lines.append("\nthe published method's flags, and the engine's, by names of their own:")
    lines += [f"  --{flag:38} = --{key}" for flag, key in FLAGS.items()]
    return "\n".join(lines)
