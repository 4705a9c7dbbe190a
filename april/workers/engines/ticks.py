"""Periodic ticks at which an engine returns the new tokens of all its sequences, so that they share one message."""

import math
import random


class Ticks:
    """Instants `period_s` apart. The first is random, so that engines started together do not tick together."""

    def __init__(self, period_s: float, now: float):
        self.period_s = period_s
        self.next = now + period_s * random.random()

    def passed(self, now: float) -> bool:
        """Whether a tick has passed since the last one returned. `now`: seconds of one monotonic clock."""
        if now < self.next:
            return False
        missed = math.floor((now - self.next) / self.period_s) if self.period_s else 0
        self.next += (missed + 1) * self.period_s
        return True
