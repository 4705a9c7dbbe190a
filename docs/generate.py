"""Writes the pages of docs/reference from the code: keys, metrics, alarms, events, messages.

python docs/generate.py     # after a change of what they list; a test says when that is due
"""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from itertools import compress, pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import msgspec

from april import wire
from april.broker.alarms.alarm import ALARMS
from april.broker.ledger.events import AnyEvent
from april.broker.views.metrics import METRICS, Exporter, Histogram, histogram_family
from april.config import Config, SourceSection, known_keys
from april.config.evaluation import EvaluationSetSection
from april.config.loading import FLAGS
from april.config.rewards import RewardPartSection
from april.config.workers import TeacherSection
from april.util.registry import PART_SYNTAX, REGISTRIES, registry_of
from april.weights.channel import AnyChannelMessage

PROTOCOL = Path(__file__).with_name("protocol.md")
REFERENCE = Path(__file__).with_name("reference")
UNITS = ("seconds", "tokens", "MiB", "GiB", "TFLOP/s", "policy steps")
UNITS_BY_SUFFIX = {"_tokens": "tokens", "_s": "seconds", "_mb": "MiB"}
"""Units of keys whose description names none."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
SEVERAL = {
    "data.sources": SourceSection,
    "evaluation.sets": EvaluationSetSection,
    "reward.part": RewardPartSection,
    "teacher": TeacherSection,
}
"""Tables that a configuration may have several of."""
HEADINGS = {key: f"[{key}.NAME]" for key in SEVERAL} | {"data.sources": "[[data.sources]]"}
EMPTY = (None, "", [], {}, ())


def pages() -> dict[str, str]:
    """The content of each page, by its name."""
    return {
        "configuration": configuration_page(),
        "metrics": metrics_page(),
        "alarms": alarms_page(),
        "events": events_page(),
        "messages": messages_page(),
    }


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
    sections: dict[str, list[list[str]]] = {}
    for key, field in keys_with_sources():
        section = key.rpartition(".")[0]
        sections.setdefault(section, []).append(key_row(key, field))
    lines = []
    for section, rows in sections.items():
        heading = HEADINGS.get(section, f"[{section}]")
        lines += [f"## `{heading}` {{#{section.replace('.', '-')}}}" if section else "## Outside of any section", ""]
        lines += [*section_docstring(section), *table(("key", "default", "unit", "what it is"), rows)]
    lines += ["## Short flags", ""]
    lines += table(("flag", "key"), ([f"`--{flag}`", f"`{key}`"] for flag, key in FLAGS.items()))
    return page("Configuration", CONFIGURATION_INTRODUCTION, lines)


CONFIGURATION_INTRODUCTION = """
    A run is described by one TOML file. Each key can be overridden on the command line: `--schedule.max_staleness 3`.
    This page is made from the code; `april run --help` says the same of each key. A key that does not exist,
    and a value that cannot work, is refused before anything starts.
"""


def keys_with_sources() -> Iterator[tuple[str, Any]]:
    """The keys of `known_keys`, each section followed by the keys of its repeated tables (`SEVERAL`)."""
    keys = known_keys()
    last = {key.partition(".")[0]: key for key in keys}
    for key, field in keys.items():
        yield key, field
        for several, model in SEVERAL.items():
            if key == last[several.partition(".")[0]]:
                yield from ((f"{several}.{name}", field) for name, field in model.model_fields.items())


def section_docstring(section: str) -> list[str]:
    annotation = Config.model_fields[section].annotation if section in Config.model_fields else None
    *_, model = annotation, *typing.get_args(annotation)  # of a table of sections: the section
    words = vars(model).get("__doc__") if model else None
    return [inspect.cleandoc(words), ""] if words else []


def key_row(key: str, field: Any) -> list[str]:
    name = key.rpartition(".")[2]
    meaning, unit = split_unit(name, field.description or "", is_number(field.annotation))
    values = ", ".join(filter(None, [parts(key), allowed(field.annotation), bounds(field.metadata)]))
    meaning += f"<br>*Values:* {values}" if values else ""
    default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
    return [f"`{name}`", default, unit, meaning]


def is_number(annotation: Any) -> bool:
    """Whether a key with this annotation is a number, or a number and other values."""
    return annotation in (int, float) or any(map(is_number, typing.get_args(annotation)))


def split_unit(name: str, description: str, number: bool) -> tuple[str, str]:
    """('start_s', 'Longest start of a server (seconds).') -> ('Longest start of a server.', 'seconds')"""
    for unit in UNITS:
        if f" ({unit})" in description:
            return description.replace(f" ({unit})", ""), unit
    return description, next((unit for suffix, unit in UNITS_BY_SUFFIX.items() if number and name.endswith(suffix)), "")


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def shown(default: Any) -> str:
    if default in EMPTY:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def parts(key: str) -> str:
    """Shipped parts that `key` can name; empty for a key that names no part."""
    names = registry_of(key).shipped if key in REGISTRIES else ()
    return ", ".join([*(f"`{name}`" for name in names), f"your own as `{PART_SYNTAX}`"]) if names else ""


def allowed(annotation: Any) -> str:
    """The values of a Literal, also of an optional one; empty for other types."""
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
    """(name, kind, meaning) of the metrics that it adds to those of `METRICS`."""
    exporter = Exporter("127.0.0.1", 0, stuck_after_s=1.0)
    try:
        families = [*exporter.collect(), histogram_family(Histogram())]
        return [(family.name, family.type, family.documentation) for family in families]
    finally:
        exporter.close()


METRICS_INTRODUCTION = """
    What the broker serves at `/metrics` for Prometheus. This page is made from the code. [Operations](../operations.md)
    says where the server listens, and which metrics are worth an alarm.
"""


# --- alarms -------------------------------------------------------------------------------------------------------


def alarms_page() -> str:
    rows = []
    for name in ALARMS.shipped:
        alarm = ALARMS.find(name)
        steps = str(alarm.steps_in_a_row) if alarm.steps_in_a_row > 1 else ""
        raised = " ".join(inspect.getdoc(alarm).split()).removeprefix("Raised ").rstrip(".")
        rows.append([f"`{name}`", f"{raised} ([more]({alarm.page.replace('docs/', '../')}))", steps])
    return page("Alarms", ALARMS_INTRODUCTION, table(("alarm", "raised", "in a row"), rows))


ALARMS_INTRODUCTION = """
    The alarms that ship, all on by default: `operations.alarms`. Those with a number are raised after so many such
    steps in a row. This page is made from the code. [Watching](../watching.md#alarms) says where a raised alarm
    appears.
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
    kinds = [*wire.MESSAGES, *typing.get_args(AnyChannelMessage)]
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
    REFERENCE.mkdir(exist_ok=True)
    for name, content in pages().items():
        (REFERENCE / f"{name}.md").write_text(content, "utf-8")
