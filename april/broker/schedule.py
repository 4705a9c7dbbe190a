"""What a schedule decides over a ledger, and the order in which waiting samples are handed out.

`rounds.py` has `sync` and `april`, `continuous.py` has `continuous`. Which of them drives a ledger may change when
the broker starts: all of them keep the ledger's staleness bound, and each takes the ledger as it finds it.
"""

from typing import Protocol

from april.broker.ledger import Ledger
from april.broker.samples import Sample


class Prompts(Protocol):
    """The training prompts in the order in which they are drawn."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, row position, int32 token ids) at the cursor or behind it; None when they are exhausted."""


class Schedule(Protocol):
    """Drives a ledger.

    while True:
        messages = drain()                    # leases, chunks, scores, lost workers -> ledger
        while schedule.advance(ledger):       # a round ended:
            ...                               # broadcast abort with ledger.watermark
        sample = choose_sample(schedule, ledger, worker_step)
    """

    def advance(self, ledger: Ledger) -> bool:
        """Start or end rounds, open groups and deliver a batch as the ledger permits; True when a round ended."""

    def finished(self, ledger: Ledger) -> bool:
        """No batch will follow the ones that were delivered."""

    def floor(self, ledger: Ledger) -> int:
        """The policy step below which a worker gets nothing for the batch being made."""

    def urgent_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What must be in the batch that is being made, lest it be overdue; for a worker at policy step `step`."""

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What a worker at policy step `step` generates next: of started groups first, then of fresh ones."""


def choose_sample(schedule: Schedule, ledger: Ledger, step: int, evaluation_share_left: bool = True) -> Sample | None:
    """What a worker at policy step `step` that has room is given next, to be leased at once.

    What only lacks its score comes first, since it costs no slot, unless scorers are there for that; then what a
    deadline needs, evaluation up to its share of the worker's slots, and training. Evaluation beyond its share gets
    what would otherwise stay idle.
    """
    return (
        (None if ledger.rules.scored_apart else ledger.queue.take_scoring())
        or schedule.urgent_sample(ledger, step)
        or (ledger.queue.take_evaluation(step) if evaluation_share_left else None)
        or schedule.next_sample(ledger, step)
        or ledger.queue.take_evaluation(step)
    )
