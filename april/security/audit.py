"""Logging of refusals at a limited rate, so that no peer can fill the disk."""

import logging

from april.processes import clock

log = logging.getLogger(__name__)

LINES_A_MINUTE = 60
"""Refusals logged per minute; further ones are only counted."""


class Audit:
    """Logs refusals. Two threads may share one; the limit is then exceeded by a line at most."""

    def __init__(self):
        self._minute = 0
        self._lines = 0
        self._suppressed = 0

    def warn(self, text: str, *arguments: object) -> None:
        minute = int(clock.now() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines > LINES_A_MINUTE:
            self._suppressed += 1
            return
        if self._suppressed:
            log.warning("%d refusals were not logged", self._suppressed)
            self._suppressed = 0
        log.warning(text, *arguments)
