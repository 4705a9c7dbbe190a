"""Where April takes a part by its name: one that is shipped, or anybody's, named as `package.module:Name`.

Each kind of part has one registry, in the room of its kind. A registry knows the configuration key that names a part,
and where the shipped ones are; it imports one when it is asked for, so that a table costs nothing:

    ENGINES = Registry("worker.engine", "engine", {"torch": "april.workers.engines.embedded.entry:TorchEntry"})
    ENGINES.find("torch")
    ENGINES.find("my_engine:Engine")     # a file of somebody's own; nothing else of April changes
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from april.errors import ConfigError

PLACE = "package.module:Name"
ROOMS = {
    "worker.engine": "april.workers.engines:ENGINES",
    "schedule.kind": "april.broker.schedules:SCHEDULES",
    "learner.backend": "april.learner.backends:BACKENDS",
    "algorithm.loss": "april.learner.losses:LOSSES",
    "algorithm.corrections": "april.learner.losses:CORRECTIONS",
    "algorithm.advantage": "april.learner.losses:ADVANTAGES",
    "algorithm.step_scale": "april.learner.losses:STEP_SCALES",
    "reward.name": "april.workers.rewards:VERIFIERS",
    "environment.name": "april.environments:ENVIRONMENTS",
    "agent.program": "april.agents:PROGRAMS",
    "schedule.group_filter": "april.filters:FILTERS",
    "operations.sinks": "april.broker.telemetry:SINKS",
    "operations.alarms": "april.broker.telemetry:ALARMS",
    "weights.transport": "april.weights:TRANSPORTS",
    "run.target": "april.launch:TARGETS",
    "launch.on": "april.launch.clusters:LAUNCHERS",
}
"""Where the registry of a configuration key is. Named, not imported: the configuration asks its registries, and all
rooms rest on the configuration."""


FOLDERS = "APRIL_FOLDERS"
"""environment variable that tells the parts of a run where somebody's own are found, as PYTHONPATH does"""


def look_in(*folders: Path) -> None:
    """Parts of one's own are found in the working directory and in these folders, too, behind what Python finds itself;
    by this process and by those that it starts."""
    inherited = [text for text in os.environ.get(FOLDERS, "").split(os.pathsep) if text]
    wanted = dict.fromkeys([os.getcwd(), *(str(folder.resolve()) for folder in folders), *inherited])
    sys.path += [folder for folder in wanted if folder not in sys.path]
    os.environ[FOLDERS] = os.pathsep.join(wanted)


@dataclass(frozen=True, eq=False)
class Registry:
    """The parts of one kind."""

    key: str
    """of the configuration, by which one is named"""
    noun: str
    """what one is, in a sentence: "is no engine" """
    shipped: Mapping[str, str] = field(default_factory=dict)
    """`package.module:Name` by name"""
    base: str = ""
    """the class that a part derives from, as `package.module:Name`; none: anything that can be called"""
    prefixes: tuple[str, ...] = ()
    """may stand before a name, one of them or several in this order, and mean something to whoever uses the part"""

    def find(self, name: str, key: str = "") -> Any:
        """The part of that name. `key`: where the name was given, if not under this registry's own.

        Raises ConfigError for a name that leads nowhere, or to something of another kind.
        """
        self.check_name(name, key)
        try:
            bare = self.bare(name)
            found = lead(self.shipped.get(bare, bare))
        except LeadsNowhere as error:
            raise self._refusal(name, key, str(error)) from error
        if objection := self._objection(found):
            raise self._refusal(name, key, objection)
        return found

    def check_name(self, name: str, key: str = "") -> None:
        """Refuse what is neither shipped nor written as a place, without importing anything. Raises ConfigError."""
        bare = self.bare(name)
        module, colon, attribute = bare.partition(":")
        written = colon and attribute and all(map(str.isidentifier, (*module.split("."), *attribute.split("."))))
        if bare not in self.shipped and not written:
            raise self._refusal(name, key, "")

    def bare(self, name: str) -> str:
        """Without what may stand before it."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name

    def those(self, fits: Callable[[Any], bool]) -> str:
        """Names of the shipped parts that `fits` says yes to, for a sentence that says which could be used instead."""
        return " or ".join(repr(name) for name in self.shipped if fits(self.find(name)))

    def _objection(self, found: Any) -> str:
        if not self.base:
            return "" if callable(found) else f"it is {found!r}, which cannot be called"
        base = lead(self.base)
        fits = isinstance(found, type) and issubclass(found, base)
        return "" if fits else f"it is {found!r}, and has to be a class that derives from {self.base}"

    def _refusal(self, name: str, key: str, why: str) -> ConfigError:
        mend = "" if name in self.shipped else did_you_mean(name, self.shipped)
        there = f"use one of {', '.join(map(repr, self.shipped))} or name" if self.shipped else "name"
        because = f" ({why})" if why else ""
        return ConfigError(
            f"key {key or self.key!r} = {name!r} is no {self.noun}{because}; {mend}{there} your own as {PLACE}"
        )


def registry_of(key: str) -> Registry:
    """Of the parts that a key names."""
    return lead(ROOMS[key])


class LeadsNowhere(LookupError):
    """The text says at which part of a place."""


@cache
def lead(place: str) -> Any:
    """What is at `package.module:Name`. Raises LeadsNowhere, whatever its module raises when it is imported."""
    module, _, attribute = place.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise LeadsNowhere(f"importing {module} raised {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, (other for other in dir(found) if not other.startswith("_")))
            raise LeadsNowhere(f"{module} has no {name!r}{hint and f', {hint}'}".rstrip())
        found = getattr(found, name)
    return found


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question with what is nearly the same, empty where nothing is; goes before a mend."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
