"""When the new tokens of all sequences of an engine are handed over together, so that one message has them."""

import math
import random


class Ticks:
    """Instants `period_s` apart; two engines that start together do not tick together."""

    def __init__(self, period_s: float, now: float):
        self.period_s = period_s
        self.next = now + period_s * random.random()

    def passed(self, now: float) -> bool:
        """Whether there was one since the last that was told of; `now`: on one clock in all calls."""
        if now < self.next:
            return False
        missed = math.floor((now - self.next) / self.period_s) if self.period_s else 0
        self.next += (missed + 1) * self.period_s
        return True
