"""Finds parts by name: engines, schedules, losses and so on, shipped ones or the user's, as `package.module:Name`.

Each kind of part has one registry in its package. A registry knows the configuration key that names the part, and the
import paths of the shipped parts, which it imports only when they are asked for:

    ENGINES = Registry("worker.engine", "engine", {"torch": "april.workers.engines.embedded.entry:TorchEntry"})
    ENGINES.find("torch")
    ENGINES.find("my_engine:Engine")     # the user's own file
"""

import difflib
import importlib
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from april.util.errors import refuse

log = logging.getLogger(__name__)

PART_SYNTAX = "package.module:Name"
REGISTRIES = {
    "worker.engine": "april.workers.engines:ENGINES",
    "schedule.kind": "april.broker.schedules:SCHEDULES",
    "learner.backend": "april.learner.backends:BACKENDS",
    "learner.optimizer": "april.learner.optimizers:OPTIMIZERS",
    "algorithm.loss": "april.learner.losses:LOSSES",
    "algorithm.corrections": "april.learner.losses:CORRECTIONS",
    "algorithm.advantage": "april.learner.losses:ADVANTAGES",
    "algorithm.length_penalty": "april.learner.losses:LENGTH_PENALTIES",
    "algorithm.step_scale": "april.learner.losses:STEP_SCALES",
    "algorithm.distillation": "april.learner.losses:DISTILLATIONS",
    "algorithm.divergence": "april.learner.losses:DIVERGENCES",
    "reward.name": "april.workers.rewards:VERIFIERS",
    "environment.name": "april.workers.environments:ENVIRONMENTS",
    "agent.program": "april.agents:PROGRAMS",
    "schedule.sampler": "april.broker.samplers:SAMPLERS",
    "schedule.group_filter": "april.broker.filters:FILTERS",
    "operations.sinks": "april.broker.telemetry.sinks:SINKS",
    "operations.alarms": "april.broker.alarms.alarm:ALARMS",
    "weights.transport": "april.weights:TRANSPORTS",
    "run.target": "april.launch:TARGETS",
    "launch.on": "april.launch.clusters:LAUNCHERS",
}
"""Configuration key -> import path of its registry. This module imports no registry, because the configuration asks the
registries, and all packages import the configuration."""


FOLDERS_VARIABLE = "APRIL_FOLDERS"
"""Environment variable with the folders of the user's own parts, for child processes; formatted like PYTHONPATH."""


def add_import_folders(*folders: Path) -> None:
    """Append the working directory and `folders` to Python's path, in this process and in those that it starts."""
    inherited = [text for text in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if text]
    wanted = dict.fromkeys([os.getcwd(), *(str(folder.resolve()) for folder in folders), *inherited])
    sys.path += [folder for folder in wanted if folder not in sys.path]
    os.environ[FOLDERS_VARIABLE] = os.pathsep.join(wanted)


def python_command(*words: str) -> list[str]:
    """Command line of a Python process with the arguments `words`. In that process a file in the working directory,
    such as `random.py`, does not hide an installed module, unless April itself is only in that directory (a checkout
    that is not installed)."""
    folders = [folder for folder in sys.path if os.path.abspath(folder) != os.getcwd()]
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))  # Python's import skips others too
    found = next(filter(None, (finder.find_spec("april", folders) for finder in finders)), None)
    installed = found is not None and found.origin == sys.modules["april"].__file__
    return [sys.executable, *(["-P"] if installed else []), *words]


def python_environment() -> dict[str, str]:
    """Environment of a child Python process with this process's import path, except for the folders of
    `add_import_folders`: on PYTHONPATH they would precede editable installs, so the child adds them itself by that
    function."""
    own = set(os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep))
    own.discard(str(Path(sys.modules["april"].__file__ or "").parents[1]))  # April itself, where it is not installed
    own |= {path for path in sys.path if Path(path).is_relative_to(sysconfig.get_path("stdlib"))}
    return os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder and folder not in own)}


@dataclass(frozen=True, eq=False)
class Registry:
    """Parts of one kind, such as engines, by name."""

    key: str
    """Key of the configuration that names a part."""
    noun: str
    """Word for one part of this kind in a sentence, such as "engine" in "is no engine"."""
    shipped: Mapping[str, str] = field(default_factory=dict)
    """Name of each shipped part -> its `package.module:Name`."""
    base: str = ""
    """Base class of the parts, as `package.module:Name`; empty: any callable is a part."""
    prefixes: tuple[str, ...] = ()
    """Prefixes, such as "group:", that a name may begin with, in this order. `find` removes them; what they mean is up
    to its caller."""

    def find(self, name: str, key: str = "") -> Any:
        """Import the part called `name`. `key`: configuration key whose value `name` is; "" for this registry's own
        key.

        Raises ConfigError if the part cannot be imported or is something of another kind.
        """
        self.check_name(name, key)
        try:
            stripped = self.without_prefix(name)
            found = import_object(self.shipped.get(stripped, stripped))
        except ImportFailed as error:
            self._refuse(name, key, str(error), error)
        if objection := self._objection(found):
            self._refuse(name, key, objection)
        return found

    def check_name(self, name: str, key: str = "") -> None:
        """Refuse a name that is neither shipped nor `package.module:Name`, without importing it. `key`: configuration
        key whose value `name` is; "" for this registry's own key. Raises ConfigError."""
        stripped = self.without_prefix(name)
        module, colon, attribute = stripped.partition(":")
        is_place = colon and attribute and all(map(str.isidentifier, (*module.split("."), *attribute.split("."))))
        if stripped not in self.shipped and not is_place:
            self._refuse(name, key)

    def without_prefix(self, name: str) -> str:
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name

    def names_where(self, fits: Callable[[Any], bool]) -> str:
        """Names of the shipped parts for which `fits` is true, joined by "or", for a sentence that offers them."""
        return " or ".join(repr(name) for name in self.shipped if fits(self.find(name)))

    def _objection(self, found: Any) -> str:
        if not self.base:
            return "" if callable(found) else f"it is {found!r}, which cannot be called"
        base = import_object(self.base)
        fits = isinstance(found, type) and issubclass(found, base)
        return "" if fits else f"it is {found!r}, and has to be a class that derives from {self.base}"

    def _refuse(self, name: str, key: str, detail: str = "", cause: Exception | None = None) -> NoReturn:
        hint = "" if name in self.shipped else did_you_mean(name, self.shipped)
        choices = f"use one of {', '.join(map(repr, self.shipped))} or name" if self.shipped else "name"
        reason = f" ({detail})" if detail else ""
        refuse(key or self.key, name, f"is no {self.noun}{reason}", f"{hint}{choices} your own as {PART_SYNTAX}", cause)


Part = TypeVar("Part")
Answer = TypeVar("Answer")


def call_each(
    parts: dict[str, Part], noun: str, call: Callable[[Part], Answer], failed: dict[str, str] | None = None
) -> dict[str, Answer]:
    """Apply `call` to each part; returns the results by the part's name. A part that raises an exception is removed
    from `parts` and logged as a failed `noun`, so that an optional part cannot end a run. `failed`: dictionary that
    gets a sentence about each removed part, by name."""
    answers = {}
    for name, part in list(parts.items()):
        try:
            answers[name] = call(part)
        except Exception as error:
            log.exception("the %s %s has failed, and is left out from here on; mend it", noun, name)
            why = f"{type(error).__name__}: {error}"
            if failed is not None:
                failed[name] = f"the {noun} {name} has failed ({why}), and is left out from here on; mend it"
            del parts[name]
    return answers


def registry_of(key: str) -> Registry:
    """The registry of the parts that a configuration key names."""
    registry: Registry = import_object(REGISTRIES[key])
    return registry


class ImportFailed(LookupError):
    """An object that could not be imported; the text says why."""


@cache
def import_object(name: str) -> Any:
    """The object at `package.module:Name`. Raises ImportFailed, whatever importing its module raises."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ImportFailed(f"importing {module} raised {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, (other for other in dir(found) if not other.startswith("_")))
            raise ImportFailed(f"{module} has no {part!r}{hint and f', {hint}'}".rstrip())
        found = getattr(found, part)
    return found


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question `did you mean 'NAME'? ` with the most similar name; empty if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
