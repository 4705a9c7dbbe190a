"""Alarms: what says in a sentence that a run is in trouble, and what to do about it.

An alarm looks at every line of metrics.jsonl before it is written; what it says stands in that line, and so in the live
view, in `april status`, in the report, and in every sink.
"""

import logging
from collections.abc import Sequence
from typing import Any

from april.broker.telemetry import ALARMS

log = logging.getLogger(__name__)


class Alarm:
    """Made when the broker starts. A restarted one shows it the lines that there are, once."""

    page = ""
    """of the documentation, that says more"""

    def look(self, record: dict[str, Any]) -> str:
        """At the line of a trained step; what is wrong and what to do, in one sentence, or nothing."""
        raise NotImplementedError


class Alarms:
    """Those of a run. One that raises is left out from then on."""

    def __init__(self, names: Sequence[str]):
        """Raises ConfigError."""
        self._alarms: dict[str, Alarm] = {name: ALARMS.find(name)() for name in names}

    def look(self, record: dict[str, Any]) -> list[dict[str, str]]:
        """Those that are raised: `name`, `sentence` and `page`."""
        raised = []
        for name, alarm in list(self._alarms.items()):
            try:
                sentence = alarm.look(record)
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
