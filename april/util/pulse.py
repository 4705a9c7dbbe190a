"""Progress of the process's main loop, and the watchdog that ends a process whose loop hangs.

The main loop marks its position at each phase; a wait marks the same position again and again. Other threads read the
position, report it, and end the process when the loop makes no progress. It is then restarted, and its log says where
it hung.
"""

import faulthandler
import logging
import os
import statistics
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

from april.util import clock
from april.util.lifetime import PartThread

log = logging.getLogger(__name__)

USUAL_VISITS = 31
"""Number of latest visits to a position whose durations are kept; their median is the position's usual duration."""
LATE = 10
"""A loop counts as hanging only after this many times its position's usual duration, and after `LoopWatch.hung_s`."""
LEAST_S = 1e-3
"""Lower bound of a position's usual duration, in seconds."""
LOOK_S = 1.0
"""Seconds between the watchdog's checks. It measures time by counting its checks, as a suspended process does not
hang."""


class LoopMark(NamedTuple):
    """The latest mark of the main loop."""

    name: str
    since: float
    """Unix time of the mark in seconds."""
    takes_long: bool
    """Whether the time at this position varies too much for a usual duration, as with file access and waits for
    peers."""


class LoopPosition(NamedTuple):
    """The position of the main loop, as a part reports it to the broker and to its watchdog (`LoopWatch`)."""

    name: str
    """Position such as "decoding"; "" before the first mark."""
    elapsed_s: float
    """Seconds at the position so far."""
    usual_s: float
    """Median seconds of earlier visits; 0 for a new position, or one that takes long."""


class Pulse:
    """The marks of the main thread's loop; calls of `at` from other threads are ignored.

    pulse.at("decoding")            # the main loop, at every phase
    position = pulse.look()         # another thread, regularly: a `LoopPosition`
    """

    def __init__(self) -> None:
        self.mark = LoopMark("", clock.now(), False)
        self._visits: dict[str, deque[float]] = {}

    def at(self, name: str, takes_long: bool = False) -> None:
        """Mark a position of the loop by its `name`, such as "decoding": the same one again, or a new one.
        `takes_long`: whether the time at this position varies too much for a usual duration."""
        if threading.current_thread() is not threading.main_thread():
            return
        now, before = clock.now(), self.mark
        self._visits.setdefault(before.name, deque(maxlen=USUAL_VISITS)).append(now - before.since)
        self.mark = LoopMark(name, now, takes_long)

    def again(self) -> None:
        """Mark the current position again, for a loop that waits there."""
        self.at(self.mark.name, self.mark.takes_long)

    def look(self) -> LoopPosition:
        """The current position of the loop."""
        name, since, takes_long = self.mark
        visits = [] if takes_long else list(self._visits.get(name, ()))
        return LoopPosition(name, clock.now() - since, max(LEAST_S, statistics.median(visits)) if visits else 0.0)


class LoopWatch(PartThread):
    """Ends the process if its loop makes no progress: at one position for `hung_s` and LATE times the median of earlier
    visits, or for `long_s` where there is no such median (`LoopPosition.usual_s` is 0). Both are in seconds. `pulse`:
    the marks of the loop; None for those of this process's main loop (MAIN)."""

    def __init__(self, hung_s: float, long_s: float, pulse: Pulse | None = None):
        super().__init__("watch", self.watch)
        self.hung_s, self.long_s, self.pulse = hung_s, long_s, pulse or MAIN
        self._mark: LoopMark | None = None
        self._seen_s = 0.0
        """Seconds for which the loop's mark has not changed: the sum of `passed_s` over the calls of `look` that have
        found the same mark."""

    def watch(self) -> None:
        """Look at the loop until it hangs, and end the process then."""
        while not (hung := self.look(LOOK_S)):
            time.sleep(LOOK_S)
        log.critical("%s; what each thread does:", hung)
        logging.shutdown()
        faulthandler.dump_traceback(sys.stderr)
        os._exit(1)

    def look(self, passed_s: float) -> str:
        """A sentence that says at which position the loop hangs; "" if it does not. `passed_s`: seconds since the last
        call, which count as spent at the loop's mark if that has not changed."""
        mark, (name, _, usual_s) = self.pulse.mark, self.pulse.look()
        self._seen_s = self._seen_s + passed_s if mark is self._mark else 0.0
        self._mark = mark
        longest_s = max(self.hung_s, LATE * usual_s) if usual_s else self.long_s
        if not name or self._seen_s < longest_s:
            return ""
        return f"the main loop hangs: it has been at {name!r} for {self._seen_s:.0f} s"


MAIN = Pulse()
"""The pulse of this process's main loop."""
