"""Refusals in the log: a line for each as far as the log can bear, so that nobody can fill a disk with them."""

import logging

from april.processes import clock

log = logging.getLogger(__name__)

LINES_A_MINUTE = 60


class Audit:
    """Used by one thread, but for a line that two may take for the last one of a minute."""

    def __init__(self):
        self._minute = 0
        self._lines = 0
        self._left_out = 0

    def say(self, text: str, *arguments: object) -> None:
        minute = int(clock.now() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines > LINES_A_MINUTE:
            self._left_out += 1
            return
        if self._left_out:
            log.warning("%d refusals were not logged", self._left_out)
            self._left_out = 0
        log.warning(text, *arguments)
