"""The base class of the configuration's sections, constants that several of them share, and sections with the keys of
the user's own parts."""

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model, model_validator

from april.util.errors import ConfigError, refuse
from april.util.registry import REGISTRIES, registry_of

AUTO: Final = "auto"
"""Value of a key by which the user leaves the choice to April, which makes it when a run starts."""
NONE = "none"
"""Text by which a TOML file or an override leaves a key unset, as TOML has no null."""
UNSET: tuple[Any, ...] = (None, "", [])
"""The defaults that mean that a key is unset."""
OFF: Final = "off"
"""Value of a key that turns off what April does by default."""
CONTEXT_TOKENS = 1 << 20
"""Largest number of tokens that a key may allow for a prompt, or for a response."""
NAME_OR_FILE = "a name, or a file where it has an ending"
"""Marker of a text field that holds a path if its value has a suffix, made absolute by `april.config.loading`, and
otherwise a name."""
HUB_NAME = "a path, or the name of a repository on a hub"
"""Marker of a key of a `HubSection` whose value is a repository's name unless a file or folder of that name exists."""


class Section(BaseModel):
    """A table of the configuration: frozen, and without other keys than its fields. The value "none" unsets a key that
    may be None, or is empty by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_none(cls, keys: Any) -> Any:
        """The keys of the section, in which each value "none" is replaced by the key's unset value (None, "" or []),
        unless "none" is an ordinary value of the key."""
        if not isinstance(keys, dict):
            return keys
        unset = {name: cls.unset_value(name) for name, value in keys.items() if value == NONE}
        return keys | {name: value for name, value in unset.items() if value is not NONE}

    def written(self) -> dict[str, Any]:
        """All keys with their values, as they are written in TOML. A key that is unset is left out, or has the value
        NONE if its default is a value."""
        keys = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is None and field.get_default(call_default_factory=True) is not None:
                keys[name] = NONE
            elif isinstance(value, Section):
                keys[name] = value.written()
            elif isinstance(value, Mapping) and any(isinstance(inner, Section) for inner in value.values()):
                keys[name] = {key: inner.written() for key, inner in value.items()}
            elif isinstance(value, list) and any(isinstance(inner, Section) for inner in value):
                keys[name] = [inner.written() for inner in value]
        return {name: value for name, value in keys.items() if value is not None}

    @classmethod
    def unset_value(cls, name: str) -> Any:
        """Value of a key that is unset: None, "" or []; NONE for a key that cannot be unset, or for which "none" is an
        ordinary value."""
        field = cls.model_fields.get(name)
        if field is None or field.is_required():
            return NONE
        if type(None) in get_args(field.annotation):
            return None
        default = field.get_default(call_default_factory=True)
        return default if default in UNSET else NONE


class HubSection(Section):
    """A section whose paths may be names of a hub's repositories, OWNER/NAME.

    Beside such a path is the commit that its revision was resolved to. With a commit the path is the folder of that
    commit in the hub's cache on this machine, and it is written as the name, since other machines have other caches.
    Without one it is a file or folder, or a relative path: a name that has not been resolved.
    """

    repository: ClassVar[Literal["model", "dataset"]] = "dataset"
    """Kind of the repositories that the section's paths may name."""
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    """Prefixes of the keys `path`, `revision` and `commit`, one for each path."""

    @model_validator(mode="before")
    @classmethod
    def in_cache(cls, keys: Any) -> Any:
        """The keys of the section: a repository's name with a commit becomes its folder in the hub's cache; a commit
        beside a path outside the cache is dropped."""
        if not isinstance(keys, dict):
            return keys
        found: dict[str, Any] = {}
        for prefix in cls.prefixes:
            path, commit = keys.get(f"{prefix}path"), keys.get(f"{prefix}commit")
            if not isinstance(path, str | Path) or commit in (None, NONE):
                continue
            if not Path(path).is_absolute():
                found[f"{prefix}path"] = cached_folder(cls.repository, str(path), str(commit))
            elif Path(path).parts[-2:] != ("snapshots", commit):
                found[f"{prefix}commit"] = None
        return keys | found

    def written(self) -> dict[str, Any]:
        names = {f"{prefix}path": self.named(prefix) for prefix in self.prefixes if getattr(self, f"{prefix}commit")}
        return super().written() | names

    def named(self, prefix: str = "") -> str:
        """The path for people to read: the name of a hub's repository, or a file or folder. `prefix`: that of the
        path's key, such as "eval_" of `eval_path`."""
        path: Path | None = getattr(self, f"{prefix}path")
        if path and getattr(self, f"{prefix}commit"):
            return path.parent.parent.name.partition("--")[2].replace("--", "/")
        return str(path)


def cached_folder(repository: str, name: str, commit: str) -> Path:
    """Folder of a hub's repository at a commit, in the hub's cache on this machine; the folder need not exist.
    `repository`: "model" or "dataset"; `name`: OWNER/NAME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).absolute() / f"{repository}s--{name.replace('/', '--')}" / "snapshots" / commit


Table = tuple[str, dict[str, Any], type[Section]]
"""A table of a configuration: its key, its content, and the section whose keys it has."""


def tables(tree: Any, model: type[Section], key: str = "") -> Iterator[Table]:
    """Yield `tree`, a configuration whose keys are those of `model`, and all tables in it. `key`: the key of `tree`
    itself, empty for a whole configuration."""
    if not isinstance(tree, dict):
        return
    yield key, tree, model
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if inner:
            value, here = tree.get(name), f"{key}.{name}".lstrip(".")
            by_name = value if isinstance(value, dict) and get_origin(field.annotation) is dict else None
            listed = dict(enumerate(value)) if isinstance(value, list) else by_name
            for number, part in (listed or {}).items():
                yield from tables(part, inner, f"{here}.{number}")
            if listed is None:
                yield from tables(value, inner, here)


# --- keys of the user's own parts -------------------------------------------------------------------------------------

KEY_SECTIONS = {"worker.engine": "engine"}
"""Key that names a part -> section to which a user-defined part adds keys of its own, if that is not the key's own
section: the keys of an engine named by `worker.engine` are keys of [engine]."""

FUNCTION_KEYS = (
    "algorithm.loss", "algorithm.corrections", "algorithm.advantage", "algorithm.step_scale", "algorithm.distillation",
    "algorithm.divergence", "algorithm.length_penalty", "schedule.group_filter",
    "schedule.sampler",
)  # fmt: skip
"""Keys that name functions whose keyword-only parameters are keys of the same section: a loss's parameter `x` is the
key `algorithm.x`."""

Model = TypeVar("Model", bound=Section)
SectionClass = TypeVar("SectionClass", bound=Section)


def with_own_keys(
    model: type[Model], tree: Mapping[str, Any], known: Callable[[str], bool] = lambda key: True
) -> type[Model]:
    """`model`, whose sections get the keys that the user's own parts, named in `tree`, declare. `known`: whether this
    process imports the part that a key (section.field) names; the keys of other parts are taken as they are.

    Raises ConfigError for a part with a key that its section has already.
    """
    parts: dict[str, list[tuple[str, Any]]] = {}
    for key in REGISTRIES:
        named, _, field = key.partition(".")
        section, keys_of = KEY_SECTIONS.get(key, named), tree.get(named)
        if {named, section} <= model.model_fields.keys() and isinstance(keys_of, Mapping):
            found = [(key, find_part(key, name) if known(key) else None) for name in own_names(key, keys_of.get(field))]
            parts.setdefault(section, []).extend(found)
    sections: dict[str, type[Section]] = {}
    for name, found in parts.items():
        base, given = model.model_fields[name].annotation, tree.get(name)
        if not found or not (isinstance(base, type) and issubclass(base, Section)):
            continue
        declaring = [(key, part) for key, part in found if isinstance(part, type) or inspect.isfunction(part)]
        extended = section_with(base, tuple(declaring))
        if isinstance(given, Mapping) and any(part is None for _, part in found):
            raw: Any = {key: (Any, value) for key, value in given.items() if key not in extended.model_fields}
            extended = create_model(base.__name__, __base__=extended, **raw) if raw else extended
        if extended is not base:
            sections[name] = extended
    return with_sections(model, tuple(sections.items())) if sections else model


@cache
def with_sections(model: type[Model], sections: tuple[tuple[str, type[Section]], ...]) -> type[Model]:
    """A subclass of `model` with other classes of some sections. `sections`: (name of the section, its new class)."""
    fields: Any = {name: (section, {}) for name, section in sections}
    return create_model(model.__name__, __base__=model, **fields)


def own_names(key: str, value: Any) -> list[str]:
    """Names of the user's own parts in the value of a key that names parts."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str) and ":" in name and name not in registry_of(key).shipped]


def find_part(key: str, name: str) -> Any:
    """The part called `name` under the configuration key `key`; None if this process cannot import it, which is an
    error only once the part is used."""
    try:
        return registry_of(key).find(name)
    except ConfigError:
        return None


@cache
def section_with(section: type[SectionClass], parts: tuple[tuple[str, Any], ...]) -> type[SectionClass]:
    """`section` with the keys that parts declare, each given as (key that names it, part): a class by a `Section`
    called `Keys` in it, a function by its keyword-only parameters. Raises ConfigError for a key that the section has of
    its own.
    """
    extended, create = section, cast(Any, create_model)
    for key, part in parts:
        own = getattr(part, "Keys", None) if isinstance(part, type) else None
        fields = own_parameters(part) if key in FUNCTION_KEYS else {}
        names = own.model_fields if own else fields
        if taken := sorted(names.keys() & extended.model_fields.keys()):
            refuse(
                key, getattr(part, "__name__", part), f"declares {taken[0]!r}, a key that its section has", "rename it"
            )
        bases: Any = (own, extended) if own else extended
        if names:
            extended = create(section.__name__, __base__=bases, **fields)
    return extended


def own_parameters(part: Any) -> dict[str, Any]:
    """(type, default) of each keyword-only parameter of a function; none of a class."""
    if isinstance(part, type) or not callable(part):
        return {}
    keyword_only = [each for each in inspect.signature(part).parameters.values() if each.kind is each.KEYWORD_ONLY]
    hints: dict[str, Any] = {}
    if keyword_only and inspect.isfunction(part):
        with suppress(NameError):  # a name that only a type checker imports: the keys are then of any type
            hints = typing.get_type_hints(part, include_extras=True)
    return {
        each.name: (hints.get(each.name, Any), ... if each.default is each.empty else each.default)
        for each in keyword_only
    }


def bound(function: Callable[..., Any], section: Section) -> Callable[..., Any]:
    """A function of the user's own with its keyword-only parameters taken from `section`."""
    keys = {name: getattr(section, name) for name in own_parameters(function) if hasattr(section, name)}
    return wraps(function)(lambda *arguments: function(*arguments, **keys)) if keys else function
