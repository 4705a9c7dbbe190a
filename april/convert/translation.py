"""Translate another framework's options to April's keys by rules, and record what cannot be translated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from april.convert.options import Options


@dataclass(frozen=True)
class MapTo:
    """The option maps to one key of April's; `convert` raises NotTranslatable for values without a counterpart."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Ignored:
    """The option only affects how the other program runs, not what is learned; `why` says how."""

    why: str


@dataclass(frozen=True)
class Unsupported:
    """April has no counterpart of the option, which changes what is learned unless its value is one of `off`."""

    why: str
    off: tuple[Any, ...] = (None, False, 0)


@dataclass(frozen=True)
class Joint:
    """The option is translated together with others, by `Framework.translate_joint`."""


JOINT = Joint()
Rule = MapTo | Ignored | Unsupported | Joint


class NotTranslatable(ValueError):
    """The value has no counterpart in April; the text says why."""


@dataclass
class Translation:
    """The translation of one script. `defaults`: the framework's defaults of options that are always translated."""

    options: Options
    table: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """By April's key: its value, and the options from which it follows."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Reasons by option that does not change what is learned."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Reasons by option that cannot be translated, so that the run differs."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Reasons by option that was not understood, or by key that the user has to choose."""

    def __post_init__(self) -> None:
        for name, why in self.options.unreadable.items():
            rule = self.rule(name)
            if isinstance(rule, Ignored):
                self.ignored[name] = rule.why
            else:
                self.undecided[name] = f"{why}; {rule.why}" if isinstance(rule, Unsupported) else why

    def given(self, name: str) -> bool:
        return name in self.options.values or name in self.options.unreadable

    def value(self, name: str) -> Any:
        """The option's value in the script, or the framework's default; None if the script's value cannot be read."""
        return self.options.values.get(name, None if name in self.options.unreadable else self.defaults.get(name))

    def number(self, name: str) -> Any:
        """As `value`; None, and recorded as undecided, if it is not a number."""
        value = self.value(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        self.undecided[name] = f"{value!r} is no number"
        return None

    def set_key(self, key: str, value: Any, *names: str) -> None:
        """Set a key that follows from the options `names`; a value of None is skipped."""
        if value is not None:
            self.keys[key] = (value, ", ".join(map(self.label, names)))

    def override(self, key: str, value: Any) -> None:
        """Set a key by the user's choice, which settles undecided entries about it."""
        self.keys[key] = (value, "chosen")
        self.undecided = {
            keys: why for keys, why in self.undecided.items() if not set(keys.split(", ")) <= self.keys.keys()
        }

    def label(self, name: str) -> str:
        """The option's name, marked if its default was used."""
        return name if self.given(name) else f"default of {name}"

    def apply_rules(self) -> None:
        """Translate each option by its own rule."""
        names = dict.fromkeys([*self.options.values, *(name for name in self.defaults if not self.given(name))])
        for name in names:
            rule, value = self.rule(name), self.value(name)
            if rule is None:
                self.undecided[name] = "it is not in April's table of this framework's options"
            elif isinstance(rule, Ignored):
                self.ignored[name] = rule.why
            elif isinstance(rule, Unsupported) and value not in rule.off:
                self.unsupported[self.with_value(name)] = rule.why
            elif isinstance(rule, MapTo) and value is not None:
                try:
                    self.set_key(rule.key, rule.convert(value), name)
                except NotTranslatable as why:
                    self.unsupported[self.with_value(name)] = str(why)
                except (TypeError, ValueError):
                    self.undecided[name] = f"{value!r} is not of the kind that was expected"

    def rule(self, name: str) -> Rule | None:
        """The option's rule, or that of the longest matching prefix with a `*`; None without one."""
        if name in self.table:
            return self.table[name]
        prefixes = [known for known in self.table if known.endswith("*") and name.startswith(known[:-1])]
        if not prefixes:
            return None
        rule = self.table[longest := max(prefixes, key=len)]
        if isinstance(rule, MapTo) and rule.key.endswith("*"):
            return MapTo(rule.key[:-1] + name[len(longest) - 1 :].replace("-", "_"), rule.convert)
        return rule

    def with_value(self, name: str) -> str:
        return f"{self.label(name)} = {self.value(name)!r}"

    def mark_unsupported(self, name: str, why: str) -> None:
        """Record that the option's value cannot be translated."""
        self.unsupported[self.with_value(name)] = why


def by_name(**meanings: Any) -> Callable[[Any], Any]:
    """A conversion of names to values; other names raise NotTranslatable."""

    def convert(value: Any) -> Any:
        name = str(value).replace("-", "_").replace("++", "_plus_plus")
        if name not in meanings:
            raise NotTranslatable(f"April has no counterpart; it knows {', '.join(meanings)}")
        return meanings[name]

    return convert


def only(value: Any, why: str) -> Callable[[Any], None]:
    """A conversion that accepts only `value`, April's own behaviour, for which no key is set."""

    def convert(given: Any) -> None:
        if given != value:
            raise NotTranslatable(why)

    return convert


def single_path(value: Any) -> Any:
    """A path, or the only one of a list. Raises NotTranslatable for several."""
    if isinstance(value, list):
        if len(value) != 1:
            raise NotTranslatable("several files are data.sources in April, each with a weight; write them there")
        return value[0]
    return value


def known_names(sinks: tuple[str, ...]) -> Callable[[Any], list[str]]:
    """A conversion of one or several names to those in `sinks`."""
    return lambda names: [name for name in sinks if name in (names if isinstance(names, list) else [names])]
