"""The reference pages of the site, made from the code at each build: keys, metrics, events, messages.

mkdocs calls `on_files`, as `hooks` in mkdocs.yml asks it to. What a key costs is not in the code but in costs.toml,
with a line for each key; a build without one, or with one too many, ends with a sentence.
"""

import ast
import inspect
import sys
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Iterator
from itertools import compress, pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from april import wire
from april.broker.ledger.events import AnyEvent
from april.broker.views.exporter import Exporter, Picture
from april.broker.views.metrics import METRICS, SYNC_BUCKETS_S, Histogram
from april.config import Config, SourceSection, known_keys
from april.config.evaluation import EvaluationSetSection
from april.config.overrides import FLAGS
from april.registry import PLACE, ROOMS, registry_of
from april.weights.lane_messages import AnyLaneMessage

COSTS, PROTOCOL = (Path(__file__).with_name(name) for name in ("costs.toml", "protocol.md"))
UNITS = ("seconds", "tokens", "MiB", "TFLOP/s", "policy steps")
UNITS_BY_SUFFIX = {"_tokens": "tokens", "_s": "seconds", "_mb": "MiB"}
"""where the description does not name the unit"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
SEVERAL = {"data.sources": SourceSection, "evaluation.sets": EvaluationSetSection}
"""sections of which a configuration may have several"""
EMPTY = (None, "", [], {}, ())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "configuration": configuration_page(),
        "metrics": metrics_page(),
        "events": events_page(),
        "messages": messages_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Without the columns that are empty in all rows."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    filled = [any(cells) for cells in zip(*rows, strict=True)]
    lines = [list(compress(line, filled)) for line in (columns, *rows)]
    lines.insert(1, ["---"] * sum(filled))
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def page(title: str, introduction: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", textwrap.dedent(introduction).strip(), "", *lines])


# --- keys ---------------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    costs = read_costs()
    sections: dict[str, list[list[str]]] = {}
    for key, field in keys_with_sources():
        section = key.rpartition(".")[0]
        sections.setdefault(section, []).append(key_row(key, field, costs.pop(key)))
    lines = []
    for section, rows in sections.items():
        heading = {"data.sources": "[[data.sources]]", "evaluation.sets": "[evaluation.sets.NAME]"}.get(
            section, f"[{section}]"
        )
        lines += [f"## `{heading}` {{#{section.replace('.', '-')}}}" if section else "## Outside of any section", ""]
        lines += [
            *section_docstring(section),
            *table(("key", "default", "unit", "what it is", "what it costs"), rows),
        ]
    lines += ["## Short flags", ""]
    lines += table(("flag", "key"), ([f"`--{flag}`", f"`{key}`"] for flag, key in FLAGS.items()))
    return page("Configuration", CONFIGURATION_INTRODUCTION, lines)


CONFIGURATION_INTRODUCTION = """
    A run is described by one TOML file. Each key can be overridden on the command line: `--schedule.max_staleness 3`.
    This page is made from the code; `april run --help` lists the same keys. A key that does not exist, and a value that
    cannot work, is refused before anything starts.
"""


def keys_with_sources() -> Iterator[tuple[str, Any]]:
    """As `known_keys`, and behind a section the keys of those of which it has several."""
    keys = known_keys()
    last = {key.partition(".")[0]: key for key in keys}
    for key, field in keys.items():
        yield key, field
        for several, model in SEVERAL.items():
            if key == last[several.partition(".")[0]]:
                yield from ((f"{several}.{name}", field) for name, field in model.model_fields.items())


def read_costs() -> dict[str, str]:
    """By key, for exactly the keys that there are. Raises PluginError."""
    costs = dict(flatten(tomllib.loads(COSTS.read_text())))
    keys = {key for key, _ in keys_with_sources()}
    if missing := sorted(keys - costs.keys()):
        raise PluginError(f"{COSTS} says nothing of {', '.join(missing)}; add what it costs, or 'Nothing.'")
    if gone := sorted(costs.keys() - keys):
        raise PluginError(f"{COSTS} names {', '.join(gone)}, which the configuration does not have; remove it")
    return costs


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def section_docstring(section: str) -> list[str]:
    field = Config.model_fields.get(section)
    words = vars(field.annotation).get("__doc__") if field else None
    return [inspect.cleandoc(words), ""] if words else []


def key_row(key: str, field: Any, cost: str) -> list[str]:
    name = key.rpartition(".")[2]
    meaning, unit = split_unit(name, field.description or "")
    values = ", ".join(filter(None, [parts(key), allowed(field.annotation), bounds(field.metadata)]))
    begins_with_a_value = f"`{meaning.split()[0].rstrip(':')}`" in values
    meaning = (f"{meaning}." if begins_with_a_value else sentence(meaning)) + (
        f"<br>*Values:* {values}" if values else ""
    )
    default = "required" if field.is_required() else shown(field.default)
    return [f"`{name}`", default, unit, meaning, cost]


def split_unit(name: str, description: str) -> tuple[str, str]:
    """('start_s', 'longest start of the server (seconds)') -> ('longest start of the server', 'seconds')"""
    for unit in UNITS:
        if description.endswith(f" ({unit})"):
            return description.removesuffix(f" ({unit})"), unit
    return description, next((unit for suffix, unit in UNITS_BY_SUFFIX.items() if name.endswith(suffix)), "")


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def shown(default: Any) -> str:
    if default in EMPTY:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def parts(key: str) -> str:
    """What ships where a key names a part; empty where it does not."""
    names = registry_of(key).shipped if key in ROOMS else ()
    return ", ".join([*(f"`{name}`" for name in names), f"your own as `{PLACE}`"]) if names else ""


def allowed(annotation: Any) -> str:
    """The values of a Literal, also of one that may be None."""
    if typing.get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (UnionType, typing.Union, tuple):
        return next(filter(None, map(allowed, typing.get_args(annotation))), "")
    return ""


def bounds(metadata: Iterable[Any]) -> str:
    found = [
        (sign, getattr(bound, name)) for bound in metadata for name, sign in BOUNDS.items() if hasattr(bound, name)
    ]
    return ", ".join(f"{sign} {limit:,}" for sign, limit in found)


# --- metrics ------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    rows = [
        [f"`{name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), sentence(metric.help)]
        for name, metric in METRICS.items()
    ]
    rows += [[f"`{name}`", kind, "", sentence(words)] for name, kind, words in metrics_of_the_exporter()]
    return page("Metrics", METRICS_INTRODUCTION, table(("metric", "kind", "labels", "meaning"), rows))


def metrics_of_the_exporter() -> list[tuple[str, str, str]]:
    """(name, kind, meaning) of what it adds to a picture without any series."""
    exporter = Exporter("127.0.0.1", 0, stuck_after_s=1.0)
    try:
        exporter.picture = Picture(None, {}, Histogram((0,) * (len(SYNC_BUCKETS_S) + 1), 0.0))
        return [(family.name, family.type, family.documentation) for family in exporter.collect()]
    finally:
        exporter.close()


METRICS_INTRODUCTION = """
    What the broker serves at `/metrics` for Prometheus. This page is made from the code. [Operations](../operations.md)
    says where the server listens, and which metrics are worth an alarm.
"""


# --- structs: events and messages ---------------------------------------------------------------------------------


def events_page() -> str:
    return page("Events", EVENTS_INTRODUCTION, describe_structs(typing.get_args(AnyEvent)))


EVENTS_INTRODUCTION = """
    The facts that the broker writes to its journal, one to a record. Applied in order to an empty ledger, they rebuild
    it. This page is made from the code. [Journal](../journal.md) says how a record lies on disk.
"""


def messages_page() -> str:
    lines, protocol = [], PROTOCOL.read_text()
    kinds = [*wire.MESSAGES, *typing.get_args(AnyLaneMessage)]
    kinds.sort(key=lambda kind: protocol.find(f"| `{kind.__name__}` |"))
    for module in dict.fromkeys(kind.__module__ for kind in kinds):
        heading = module.rpartition(".")[2].replace("_", " ").capitalize()
        lines += [f"## {heading}", "", inspect.cleandoc(sys.modules[module].__doc__ or ""), ""]
        lines += describe_structs(structs_of(module), level=3)
    return page("Messages", MESSAGES_INTRODUCTION, lines)


def structs_of(module: str) -> list[type[msgspec.Struct]]:
    """The messages that a module defines, and what they are made of, in its order."""
    kinds = [kind for kind in vars(sys.modules[module]).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, msgspec.Struct) and kind.__module__ == module]


MESSAGES_INTRODUCTION = """
    Every message of the protocol with its fields, in their order on the wire. This page is made from the code.
    [Protocol](../protocol.md) says who sends what when, and how it is framed: that page is enough to write a client.
"""


def describe_structs(kinds: Iterable[type[msgspec.Struct]], level: int = 2) -> Iterator[str]:
    for kind in kinds:
        yield from (f"{'#' * level} `{kind.__name__}`", "")
        if words := vars(kind).get("__doc__"):
            yield from (inspect.cleandoc(words), "")
        notes = attribute_docstrings(kind)
        rows = [
            [f"`{field.name}`", f"`{type_name(field.type)}`", default_of(field), notes.get(field.name, "")]
            for field in msgspec.structs.fields(kind)
        ]
        yield from table(("field", "type", "default", "meaning"), rows) if rows else ("No fields.", "")


def attribute_docstrings(kind: type) -> dict[str, str]:
    """What stands under each attribute of a class, by the attribute's name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    return {
        attribute.target.id: " ".join(words.value.value.split())
        for attribute, words in pairwise(body)
        if isinstance(attribute, ast.AnnAssign)
        and isinstance(words, ast.Expr)
        and isinstance(words.value, ast.Constant)
        and isinstance(words.value.value, str)
    }


def type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (UnionType, typing.Union):
        return " or ".join(map(type_name, arguments))
    if arguments:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return "null" if annotation is NoneType else annotation.__name__


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{value!r}`"


if __name__ == "__main__":
    sys.exit("mkdocs calls this; `mkdocs serve` shows the pages")
