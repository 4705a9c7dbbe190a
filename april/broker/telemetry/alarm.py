"""Alarms: what says in a sentence that a run is in trouble, and what to do about it.

An alarm looks at every line of metrics.jsonl before it is written; what it says stands in that line, and so in the live
view, in `april status`, in the report, and in every sink. It may also watch, between steps, where the parts of the run
are; what it says of that stands in the status as long as it is so, and once in the broker's log.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from april.broker.sessions import Stay
from april.broker.telemetry import ALARMS

log = logging.getLogger(__name__)


class Alarm:
    """Made when the broker starts. A restarted one shows it, once, the first lines of a run, and the newest: those
    that a learner can go back to, and three more."""

    page = ""
    """of the documentation, that says more"""

    def look(self, record: dict[str, Any]) -> str:
        """At the line of a trained step; what is wrong and what to do, in one sentence, or nothing."""
        raise NotImplementedError

    def watch(self, stays: Sequence[Stay]) -> str:
        """At where the main loops of workers, scorers and learner are, several times a second: the same."""
        return ""


class Alarms:
    """Those of a run. One that raises is left out from then on."""

    def __init__(self, names: Sequence[str]):
        """Raises ConfigError."""
        self._alarms: dict[str, Alarm] = {name: ALARMS.find(name)() for name in names}
        self.raised: list[dict[str, str]] = []
        """by what is so just now"""

    @property
    def names(self) -> list[str]:
        """Of those that look."""
        return list(self._alarms)

    def look(self, record: dict[str, Any]) -> list[dict[str, str]]:
        """Those that a line raises: `name`, `sentence` and `page`."""
        return self._ask(lambda alarm: alarm.look(record))

    def watch(self, stays: Sequence[Stay]) -> None:
        """What is `raised` from now on."""
        known, self.raised = {alarm["name"] for alarm in self.raised}, self._ask(lambda alarm: alarm.watch(stays))
        for alarm in self.raised:
            if alarm["name"] not in known:
                log.warning("ALARM %s: %s", alarm["name"], alarm["sentence"])

    def _ask(self, question: Callable[[Alarm], str]) -> list[dict[str, str]]:
        raised = []
        for name, alarm in list(self._alarms.items()):
            try:
                sentence = question(alarm)
            except Exception:
                log.exception("the alarm %s has failed, and is left out from here on; mend it", name)
                del self._alarms[name]
                continue
            if sentence:
                raised.append({"name": name, "sentence": sentence, "page": alarm.page})
        return raised


def check_alarms(names: Sequence[str]) -> None:
    """Raises ConfigError unless each can be found."""
    for name in names:
        ALARMS.find(name)
