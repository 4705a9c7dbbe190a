"""Alarms: each says in one sentence that a run is in trouble, and what to do about it.

An alarm checks the record of every trained step before the record is written to metrics.jsonl. The record holds the
sentences of the alarms it raises, and so do the live view, `april status`, the report and every sink. Between steps an
alarm may also check where the main loops of the run's processes are. Such a sentence is shown in the status for as long
as it is true, and logged once by the broker.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from april.broker.peers import PeerLoop
from april.broker.telemetry import ALARMS

log = logging.getLogger(__name__)


class Alarm:
    """Base class of alarms, created when the broker starts.

    After a restart the broker replays step records to it: the first of the run, and the newest ones, which are three
    steps and those from which a learner may restart.
    """

    page = ""
    """Page of the documentation that explains the alarm, as a path in the repository."""

    def look(self, record: dict[str, Any]) -> str:
        """Check the record of a trained step; returns what is wrong and what to do, in one sentence, or "" if nothing
        is."""
        raise NotImplementedError

    def watch(self, loops: Sequence[PeerLoop]) -> str:
        """Check the positions of the main loops of workers, scorers and learner, several times a second; returns the
        same as `look`."""
        return ""


class Alarms:
    """The alarms of a run. One that raises an exception is not used any more."""

    def __init__(self, names: Sequence[str]):
        """Raises ConfigError for a name that is not found."""
        self._alarms: dict[str, Alarm] = {name: ALARMS.find(name)() for name in names}
        self.raised: list[dict[str, str]] = []
        """Alarms that the last `watch` raised: `name`, `sentence` and `page` of each."""

    @property
    def names(self) -> list[str]:
        """Names of the alarms in use."""
        return list(self._alarms)

    def look(self, record: dict[str, Any]) -> list[dict[str, str]]:
        """Check the record of a step with all alarms; returns `name`, `sentence` and `page` of each alarm that it
        raises."""
        return self._raised_by(lambda alarm: alarm.look(record))

    def watch(self, loops: Sequence[PeerLoop]) -> None:
        """Check the positions of the main loops with all alarms: update `raised`, and log each alarm that is new
        there."""
        known, self.raised = {alarm["name"] for alarm in self.raised}, self._raised_by(lambda alarm: alarm.watch(loops))
        for alarm in self.raised:
            if alarm["name"] not in known:
                log.warning("ALARM %s: %s", alarm["name"], alarm["sentence"])

    def _raised_by(self, check: Callable[[Alarm], str]) -> list[dict[str, str]]:
        raised = []
        for name, alarm in list(self._alarms.items()):
            try:
                sentence = check(alarm)
            except Exception:
                log.exception("the alarm %s has failed, and is left out from here on; mend it", name)
                del self._alarms[name]
                continue
            if sentence:
                raised.append({"name": name, "sentence": sentence, "page": alarm.page})
        return raised


def check_alarms(names: Sequence[str]) -> None:
    """Raise ConfigError unless every alarm is found."""
    for name in names:
        ALARMS.find(name)


class ConsecutiveAlarm(Alarm):
    """Base class of alarms about figures that chance alone may produce in a single step.

    The alarm is raised once `wrong` has returned a sentence for `steps` steps in a row; the newest sentence is shown.
    """

    steps = 3

    def __init__(self) -> None:
        self.in_a_row = 0

    def wrong(self, record: dict[str, Any]) -> str:
        """Check the record of a step; returns what is wrong and what to do, in one sentence, or "" if nothing is."""
        raise NotImplementedError

    def look(self, record: dict[str, Any]) -> str:
        sentence = self.wrong(record)
        self.in_a_row = self.in_a_row + 1 if sentence else 0
        return sentence if self.in_a_row >= self.steps else ""
