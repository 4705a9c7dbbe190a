"""Limits the load of workers that have the newest weights while other workers still load them.

Workers finish loading within moments of each other, and a round's samples wait for that. Without a limit the first
worker would take all samples up to its slots, and the last would get the remainder: a long step there, idle slots here.
"""

import math
from collections.abc import Sequence

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import TO_GENERATE
from april.broker.sessions import Peer

LONGEST_S = 10.0
"""Longest time that the limit holds; otherwise it holds for as long as the first worker took to load."""


class FillLimit:
    def __init__(self) -> None:
        self._until = 0.0

    def first_loaded(self, loaded_in_s: float, now: float) -> None:
        """Start the limit: the first worker has loaded new weights, in so many seconds."""
        self._until = now + min(loaded_in_s, LONGEST_S)

    def max_load(self, workers: Sequence[Peer], newest_step: int, ledger: Ledger, now: float) -> float:
        """Largest load of each worker as a share of its capacity; infinite if there is no limit."""
        if now >= self._until or not ledger.round_open:
            return math.inf
        loaded = [worker for worker in workers if worker.version is not None and worker.capacity]
        if all(worker.step >= newest_step for worker in loaded):
            self._until = 0.0
            return math.inf
        if not (waiting := sum(map(ledger.open_samples.count, TO_GENERATE))):
            return math.inf
        return (waiting + ledger.generating) / sum(worker.capacity for worker in loaded)
