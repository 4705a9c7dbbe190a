"""The process that makes the next snapshot: it applies the journal files closed since to the last snapshot.

    python -m april.broker.snapshot_process FOLDER POSITION RULES

It writes one line, the journal files no longer needed, and waits until the broker has closed them. It holds no lock and
changes nothing that the broker writes, so either may be killed at any time. It ends with its broker. Its exit status is
the result.
"""

import gc
import logging
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from april.broker.journal.files import JournalError, file_path, file_starts, read_closed, reclaimable_files
from april.broker.journal.snapshot import SnapshotStore, freeze, live_positions
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.replay import rebuild_ledger
from april.broker.telemetry.lives import SampleHistory
from april.processes.lifetime import end, end_with_parent, give_way

log = logging.getLogger(__name__)

MODULE = "april.broker.snapshot_process"
DONE, NOT_WRITTEN, NOT_READ = 0, 3, 4
"""Exit statuses: the snapshot is on disk; it could not be written; the journal files cannot be read."""


def make_snapshot(folder: Path, until: int, rules: Rules) -> Iterator[list[int]]:
    """Make the snapshot at position `until`, in two phases around one yield.

    First it rebuilds the ledger and yields the starts of the files no longer needed; when resumed, it deletes them and
    writes the snapshot. Only files before the older of the two snapshots on disk are deleted, so that a failure here
    loses nothing. Raises JournalError if the journal cannot be read, OSError if the disk fails.
    """
    ledger, store = Ledger(rules), SnapshotStore(folder)
    history = SampleHistory(ledger)
    position = rebuild_ledger(ledger, history, store, partial(read_closed, folder, until=until))
    starts = [start for start in file_starts(folder) if start <= until]
    older = [0, *(other for other in store.positions() if other < position)][-1]
    dead = reclaimable_files(starts, older, chain(live_positions(ledger), history.discards.positions()))
    yield dead
    for start in dead:
        file_path(folder, start).unlink(missing_ok=True)
    store.write(until, freeze(ledger, history.freeze()), previous=position)


def main(folder: str, position: str, rules: str) -> int:
    gc.disable()
    try:
        for dead in make_snapshot(Path(folder), int(position), msgspec.json.decode(rules, type=Rules)):
            sys.stdout.write(f"{msgspec.json.encode(dead).decode()}\n")
            sys.stdout.flush()
            if not sys.stdin.readline():
                return NOT_WRITTEN
    except JournalError as error:
        log.error("%s", error)
        return NOT_READ
    except OSError as error:
        log.error("%s", error)
        return NOT_WRITTEN
    return DONE


if __name__ == "__main__":
    end_with_parent()
    give_way()
    end(main(*sys.argv[1:]))
