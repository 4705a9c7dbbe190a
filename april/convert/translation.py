"""A configuration in the making: what is said of each option of another framework, and what cannot be said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from april.convert.options import Options


@dataclass(frozen=True)
class To:
    """An option that one key of April's says; `convert` raises Differs for values that it cannot say."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Apart:
    """An option of how the other program runs. Nothing of it changes what is learned."""

    why: str


@dataclass(frozen=True)
class Lacks:
    """An option that April has nothing for, and that changes what is learned, unless it is `off`."""

    why: str
    off: tuple[Any, ...] = (None, False, 0)


@dataclass(frozen=True)
class Joint:
    """An option that means something together with others; the framework's `joint` says what."""


JOINT = Joint()
Rule = To | Apart | Lacks | Joint


class Differs(ValueError):
    """What April cannot say, in a sentence."""


@dataclass
class Translation:
    """Of one script. `defaults`: what the framework takes where the script says nothing, of options that have to be
    said."""

    options: Options
    table: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """of April's: the value, and the options that say it"""
    apart: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    """what was not understood, and what the script does not say but a run has to know"""

    def __post_init__(self) -> None:
        for name, why in self.options.unread.items():
            rule = self.rule(name)
            if isinstance(rule, Apart):
                self.apart[name] = rule.why
            else:
                self.open[name] = f"{why}; {rule.why}" if isinstance(rule, Lacks) else why

    def given(self, name: str) -> bool:
        return name in self.options.values or name in self.options.unread

    def value(self, name: str) -> Any:
        """As the script says it, or the framework's default. None where it says it, but not readably."""
        return self.options.values.get(name, None if name in self.options.unread else self.defaults.get(name))

    def number(self, name: str) -> Any:
        """The same, None too where it is no number, which is then open."""
        value = self.value(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        self.open[name] = f"{value!r} is no number"
        return None

    def say(self, key: str, value: Any, *names: str) -> None:
        """None is not said."""
        if value is not None:
            self.keys[key] = (value, ", ".join(map(self.written, names)))

    def choose(self, key: str, value: Any) -> None:
        """Whoever converts says it; what was open about nothing else is no more."""
        self.keys[key] = (value, "chosen")
        self.open = {keys: why for keys, why in self.open.items() if not set(keys.split(", ")) <= self.keys.keys()}

    def written(self, name: str) -> str:
        return name if self.given(name) else f"default of {name}"

    def rules(self) -> None:
        """What each option says by itself."""
        named = dict.fromkeys([*self.options.values, *(name for name in self.defaults if not self.given(name))])
        for name in named:
            rule, value = self.rule(name), self.value(name)
            if rule is None:
                self.open[name] = "it is not in April's table of this framework's options"
            elif isinstance(rule, Apart):
                self.apart[name] = rule.why
            elif isinstance(rule, Lacks) and value not in rule.off:
                self.differs[self.with_value(name)] = rule.why
            elif isinstance(rule, To) and value is not None:
                try:
                    self.say(rule.key, rule.convert(value), name)
                except Differs as why:
                    self.differs[self.with_value(name)] = str(why)
                except (TypeError, ValueError):
                    self.open[name] = f"{value!r} is not of the kind that was expected"

    def rule(self, name: str) -> Rule | None:
        """Its own, or that of the longest beginning that the table has with a `*`."""
        if name in self.table:
            return self.table[name]
        beginnings = [known for known in self.table if known.endswith("*") and name.startswith(known[:-1])]
        if not beginnings:
            return None
        rule = self.table[longest := max(beginnings, key=len)]
        if isinstance(rule, To) and rule.key.endswith("*"):
            return To(rule.key[:-1] + name[len(longest) - 1 :].replace("-", "_"), rule.convert)
        return rule

    def with_value(self, name: str) -> str:
        return f"{self.written(name)} = {self.value(name)!r}"

    def differ(self, name: str, why: str) -> None:
        self.differs[self.with_value(name)] = why


def one_of(**meanings: Any) -> Callable[[Any], Any]:
    """A conversion of names; others have no counterpart."""

    def convert(value: Any) -> Any:
        name = str(value).replace("-", "_").replace("++", "_plus_plus")
        if name not in meanings:
            raise Differs(f"April has no counterpart; it knows {', '.join(meanings)}")
        return meanings[name]

    return convert


def only(value: Any, why: str) -> Callable[[Any], None]:
    """A conversion that says nothing of `value`, which is what April does, and refuses any other."""

    def convert(given: Any) -> None:
        if given != value:
            raise Differs(why)

    return convert


def first_of(value: Any) -> Any:
    """A path, of a list the only one."""
    if isinstance(value, list):
        if len(value) != 1:
            raise Differs("several files are data.sources in April, each with a weight; write them there")
        return value[0]
    return value


def named(sinks: tuple[str, ...]) -> Callable[[Any], list[str]]:
    """A conversion of one name or several, of which April knows `sinks`."""
    return lambda names: [name for name in sinks if name in (names if isinstance(names, list) else [names])]
