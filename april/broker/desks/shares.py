"""What a worker is filled to at most while others take in the same weights.

They come within moments of each other, and a round's samples wait for them. The first would get all of them, up to its
slots, and the last what is left: long steps there, idle slots here, until the round is over.
"""

import math
from collections.abc import Sequence

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import TO_GENERATE
from april.broker.sessions import Session

LONGEST_S = 10.0
"""for which the first to hold weights waits for the others, who have as long again as it took; then it gets the rest"""


class Shares:
    def __init__(self) -> None:
        self._until = 0.0

    def first_has(self, loaded_in_s: float, now: float) -> None:
        """A worker is the first to hold weights, which took it so long."""
        self._until = now + min(loaded_in_s, LONGEST_S)

    def fullest(self, workers: Sequence[Session], newest_step: int, ledger: Ledger, now: float) -> float:
        """Share of its capacity up to which each of `workers` is filled; infinite: as far as it has room."""
        if now >= self._until or not ledger.round_open:
            return math.inf
        holding = [one for one in workers if one.version is not None and one.capacity]
        if all(one.step >= newest_step for one in holding):
            self._until = 0.0
            return math.inf
        if not (waiting := sum(map(ledger.open_samples.count, TO_GENERATE))):
            return math.inf
        return (waiting + ledger.generating) / sum(one.capacity for one in holding)
