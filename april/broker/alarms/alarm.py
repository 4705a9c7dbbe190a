"""The base class of alarms, their registry, and the alarms of a run.

An alarm says in one sentence that a run is in trouble, and what to do about it. It checks the record of every trained
step before the record is written to metrics.jsonl. The record holds the sentences of the alarms it raises, and so do
the live view, `april status`, the report and every sink. Between steps an alarm may also check where the main loops of
the run's processes are. Such a sentence is shown in the status for as long as it is true, and logged once by the
broker.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from april.util.errors import refuse
from april.util.registry import Registry, call_each

if TYPE_CHECKING:
    from april.broker.peers import PeerLoop

log = logging.getLogger(__name__)

SHIPPED: dict[str, str] = {}
"""Name of each alarm that ships with April, in this folder -> its `package.module:Class`."""
ALARMS = Registry("operations.alarms", "alarm", SHIPPED, base=f"{__name__}:Alarm")


FAILED_PAGE = "docs/extending.md#an-alarm"
"""Documentation page shown for an alarm that has itself failed with an exception: how to write an alarm."""


class Alarm:
    """Base class of alarms, created when the broker starts.

    Alarms store nothing, so a restarted broker passes records of earlier steps to `look` again: those of the run's
    first steps, those of the steps that a learner may still train again, and those of the three steps before the
    latter.
    """

    page = "docs/watching.md#alarms"
    """Page of the documentation that explains the alarm, as a path in the repository."""
    steps_in_a_row = 1
    """Number of steps in a row for which `look` has to return a sentence until the alarm is raised: more than 1 for
    figures that chance alone may produce in a single step."""

    def look(self, record: dict[str, Any]) -> str:
        """Check the record of a trained step; returns a sentence that says what is wrong and what to do, "" if nothing
        is wrong."""
        return ""

    def watch(self, loops: Sequence["PeerLoop"]) -> str:
        """Check the positions of the main loops of workers, scorers and learner, several times a second. Returns a
        sentence that says what is wrong and what to do, "" if nothing is wrong."""
        return ""


AlarmClass = TypeVar("AlarmClass", bound=type[Alarm])


def shipped(name: str) -> Callable[[AlarmClass], AlarmClass]:
    """Decorator of a class in this folder: it is found as the alarm `name`, on by default, and listed in the reference
    with its docstring, "Raised when ..."."""

    def register(alarm: AlarmClass) -> AlarmClass:
        SHIPPED[name] = f"{alarm.__module__}:{alarm.__name__}"
        return alarm

    return register


def figures(record: dict[str, Any], part: str) -> dict[str, Any]:
    """The value of the key `part`, such as `learner`, in the record of a step; empty if the record lacks it."""
    return record.get(part) or {}


class Alarms:
    """The alarms of a run. An alarm that fails with an exception is dropped, and `raised` lists it as failed from then
    on."""

    def __init__(self, names: Sequence[str]):
        """`names`: names of the alarms to use. Raises ConfigError for a name that is not found."""
        self._alarms: dict[str, Alarm] = {name: ALARMS.find(name)() for name in names}
        self._in_a_row: dict[str, int] = {}
        """Number of newest steps in a row for which an alarm has returned a sentence, by name of the alarm."""
        self._failed: dict[str, str] = {}
        """A sentence about each alarm that has raised an exception, by its name."""
        self._watched: list[dict[str, str]] = []

    @property
    def names(self) -> list[str]:
        """Names of the alarms in use."""
        return list(self._alarms)

    @property
    def raised(self) -> list[dict[str, str]]:
        """The alarms that the last `watch` raised, and those that have failed, each with `name`, `sentence` and `page`
        (a path of the documentation)."""
        failed = [{"name": name, "sentence": text, "page": FAILED_PAGE} for name, text in self._failed.items()]
        return [*self._watched, *failed]

    def look(self, record: dict[str, Any]) -> list[dict[str, str]]:
        """Check the record of a step with all alarms; returns `name`, `sentence` and `page` of each alarm that it
        raises."""
        wrong = self._ask(lambda alarm: alarm.look(record))
        self._in_a_row = {alarm["name"]: self._in_a_row.get(alarm["name"], 0) + 1 for alarm in wrong}
        return [alarm for alarm in wrong if self._in_a_row[alarm["name"]] >= self._alarms[alarm["name"]].steps_in_a_row]

    def watch(self, loops: Sequence["PeerLoop"]) -> None:
        """Check the positions of the main loops with all alarms: update `raised`, and log each alarm that `raised` did
        not list before."""
        known, self._watched = {alarm["name"] for alarm in self._watched}, self._ask(lambda alarm: alarm.watch(loops))
        for alarm in self._watched:
            if alarm["name"] not in known:
                log.warning("ALARM %s: %s", alarm["name"], alarm["sentence"])

    def _ask(self, check: Callable[[Alarm], str]) -> list[dict[str, str]]:
        """Run `check` on each alarm; returns `name`, `sentence` and `page` of those for which it returns a sentence."""
        wrong = call_each(self._alarms, "alarm", check, self._failed)
        return [
            {"name": name, "sentence": sentence, "page": self._alarms[name].page}
            for name, sentence in wrong.items()
            if sentence
        ]


def check_alarms(names: Sequence[str]) -> str:
    """A sentence that names the shipped alarms missing from `names`; empty if none is. Raises ConfigError for a name
    that is not found, or an alarm class that overrides neither `look` nor `watch`."""
    for name in names:
        found = ALARMS.find(name)
        if found.look is Alarm.look and found.watch is Alarm.watch:
            refuse(
                ALARMS.key,
                name,
                "has neither the method look nor watch, so it would never be raised",
                "write one of them",
            )
    without = [name for name in SHIPPED if name not in names]
    return f"without {', '.join(without)}; name them in {ALARMS.key} to keep them" if without else ""
