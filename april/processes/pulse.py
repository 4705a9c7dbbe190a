"""Where the main loop of this process is, and since when: it marks its way, and another thread looks.

The main loop marks where it has got to; whoever waits marks the same place again and again. A thread tells others, and
ends the process when the loop gets nowhere: what hangs is started again, with where it hung in its log.
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

from april.processes import clock

log = logging.getLogger(__name__)

USUAL_VISITS = 31
"""to a place, the newest, of which the median says how long one usually takes"""
LATE = 10
"""times as long as usual is suspicious"""
LEAST_S = 1e-3
"""a shorter usual stay is taken for this long"""
LOOK_S = 1.0
"""between two looks; a process that slept itself, with all of its threads, has not hung meanwhile"""


class Place(NamedTuple):
    name: str
    since: float
    takes_long: bool
    """how long it takes says nothing about the next time: files, and whatever others do"""


class Stay(NamedTuple):
    """What others are told of the loop."""

    place: str
    for_s: float
    usual_s: float
    """the median of what it took there before, 0 where it is new, or takes long"""


class Pulse:
    """Of the main thread's loop; marks that others make say nothing.

    pulse.at("decoding")            # the loop, at every mark
    pulse.look()                    # another thread, now and then
    """

    def __init__(self) -> None:
        self.mark = Place("", clock.now(), False)
        self._visits: dict[str, deque[float]] = {}

    def at(self, place: str, takes_long: bool = False) -> None:
        """The loop has got here, again perhaps."""
        if threading.current_thread() is not threading.main_thread():
            return
        now, before = clock.now(), self.mark
        self._visits.setdefault(before.name, deque(maxlen=USUAL_VISITS)).append(now - before.since)
        self.mark = Place(place, now, takes_long)

    def again(self) -> None:
        """The loop has got once more to where it is."""
        self.at(self.mark.name, self.mark.takes_long)

    def look(self) -> Stay:
        place, since, takes_long = self.mark
        visits = [] if takes_long else list(self._visits.get(place, ()))
        return Stay(place, clock.now() - since, max(LEAST_S, statistics.median(visits)) if visits else 0.0)


class Watch(threading.Thread):
    """Ends the process once its loop has got nowhere for `hung_s`, and LATE times as long as usual there; for `long_s`
    at a place that is new to it, or takes long."""

    def __init__(self, hung_s: float, long_s: float, pulse: Pulse | None = None):
        super().__init__(name="watch", daemon=True)
        self.hung_s, self.long_s, self.pulse = hung_s, long_s, pulse or MAIN
        self._mark: Place | None = None
        self._seen_s = 0.0
        """that it has been there while this thread looked"""

    def run(self) -> None:
        while not (hung := self.look(LOOK_S)):
            time.sleep(LOOK_S)
        log.critical("%s; what each thread does:", hung)
        logging.shutdown()
        faulthandler.dump_traceback(sys.stderr)
        os._exit(1)

    def look(self, passed_s: float) -> str:
        """So long after the last look: in a sentence, whether the loop hangs."""
        mark, (place, _, usual_s) = self.pulse.mark, self.pulse.look()
        self._seen_s = self._seen_s + passed_s if mark is self._mark else 0.0
        self._mark = mark
        longest_s = max(self.hung_s, LATE * usual_s) if usual_s else self.long_s
        if not place or self._seen_s < longest_s:
            return ""
        return f"the main loop hangs: it has been at {place!r} for {self._seen_s:.0f} s"


MAIN = Pulse()
"""of this process's main loop"""
