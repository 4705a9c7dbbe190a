"""Make the next snapshot beside the broker: the last one, and the journal files that were closed since.

    python -m april.broker.snapshot_process FOLDER POSITION RULES

It writes one line, the files that nobody needs any more, and waits until the broker has let go of them. It holds no
lock and changes nothing that the broker writes. So both may be killed at any instant. One whose broker is gone ends.
Its exit status says how it went.
"""

import gc
import logging
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from april.broker.journal.files import JournalError, file_path, file_starts, read_closed, unneeded
from april.broker.journal.snapshot import SnapshotStore, freeze, live_positions
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.replay import put_back
from april.broker.telemetry.lives import Lives
from april.processes.lifetime import end, end_with_parent, give_way

log = logging.getLogger(__name__)

MODULE = "april.broker.snapshot_process"
DONE, NOT_WRITTEN, NOT_READ = 0, 3, 4
"""what it can say: a whole snapshot is on disk; the disk did not take it; the files cannot be read back"""


def make_snapshot(folder: Path, until: int, rules: Rules) -> Iterator[list[int]]:
    """Yields once, where the files begin that nobody needs any more; they are deleted when it is resumed, and the
    ledger as it was at `until` is put on disk.

    Space is reclaimed below the older of the two snapshots on disk, whatever becomes of this one. Raises JournalError
    where the files cannot be read back, OSError where the disk refuses.
    """
    ledger, store = Ledger(rules), SnapshotStore(folder)
    lives = Lives(ledger)
    position = put_back(ledger, lives, store, partial(read_closed, folder, until=until))
    starts = [start for start in file_starts(folder) if start <= until]
    older = [0, *(other for other in store.positions() if other < position)][-1]
    dead = unneeded(starts, older, chain(live_positions(ledger), lives.discards.positions()))
    yield dead
    for start in dead:
        file_path(folder, start).unlink(missing_ok=True)
    store.write(until, freeze(ledger, lives.freeze()), before=position)


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
