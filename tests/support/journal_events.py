"""Reads the journal of a run whose broker has ended."""

from contextlib import closing

from april.broker.journal.journal import Journal
from april.wire.rows import padded


def events(run_dir):
    """Yield all events of the journal."""
    with closing(Journal(run_dir / "journal")) as journal:
        for event, _ in journal.replay():
            yield event


def events_and_arrays(run_dir):
    with closing(Journal(run_dir / "journal")) as journal:
        for _, reference in journal.replay():
            yield journal.read(reference)


def with_payloads(event, arrays):
    """Yield the rows of a `RowsAccepted` event, each with its own payload bytes."""
    [(_, payload)] = arrays
    offset, view = 0, memoryview(payload)
    for row in event.rows:
        yield row, view[offset : offset + row.size]
        offset += padded(row.size)
