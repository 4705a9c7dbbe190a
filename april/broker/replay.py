"""A ledger put back from a snapshot and the facts behind it: at a broker's start, and for the next snapshot."""

from collections.abc import Callable, Iterable

from april.broker.journal.files import Reference
from april.broker.journal.snapshot import SnapshotStore, thaw
from april.broker.ledger.events import Event
from april.broker.ledger.ledger import Ledger
from april.broker.telemetry.lives import Lives


def put_back(
    ledger: Ledger,
    lives: Lives,
    snapshots: SnapshotStore,
    facts_from: Callable[[int], Iterable[tuple[Event, Reference]]],
) -> int:
    """Put an empty ledger, and what is told beside it, into the state of the newest whole snapshot and of all the facts
    from its position on; returns that position, 0 where there is none."""
    position, image = next(snapshots.newest_first(), (0, None))
    if image:
        lives.thaw(thaw(image, ledger))
    image = None
    for event, reference in facts_from(position):
        lives.see(event)
        ledger.apply(event, reference)
    return position
