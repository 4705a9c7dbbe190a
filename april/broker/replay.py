"""Rebuilding a ledger from a snapshot and the events after it: at a broker's start, and for the next snapshot."""

from collections.abc import Callable, Iterable

from april.broker.journal.files import Reference
from april.broker.journal.snapshot import SnapshotStore, thaw
from april.broker.ledger.events import Event
from april.broker.ledger.ledger import Ledger
from april.broker.telemetry.lives import SampleHistory


def rebuild_ledger(
    ledger: Ledger,
    history: SampleHistory,
    snapshots: SnapshotStore,
    events_from: Callable[[int], Iterable[tuple[Event, Reference]]],
) -> int:
    """Rebuild an empty ledger and its sample history from the newest whole snapshot and the events after it.

    `events_from(position)`: (event, reference) of each record from that position on. Returns the snapshot's position, 0
    without a snapshot.
    """
    position, image = next(snapshots.newest_first(), (0, None))
    if image:
        history.thaw(thaw(image, ledger))
    image = None
    for event, reference in events_from(position):
        history.record(event)
        ledger.apply(event, reference)
    return position
