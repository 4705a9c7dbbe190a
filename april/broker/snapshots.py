"""Snapshots of the ledger: rebuilding a ledger from the newest one, and making the next one in a helper process.

`Snapshots` keeps the newest snapshot up to date with the closed journal files. The broker never waits for the helper
process: it starts and polls the process, and closes the files that the process asks to delete. Failures are counted and
retried with growing delays. A fork of the broker would not have to read the journal, but would inherit the journal's
lock and keep out the next broker.
"""

import contextlib
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec

from april.broker.journal.files import (
    JournalError,
    Reference,
    Unreadable,
    file_path,
    file_starts,
    read_closed,
    reclaimable_files,
)
from april.broker.journal.snapshot import SnapshotStore, freeze, live_positions, thaw
from april.broker.ledger.events import Event
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.telemetry.sample_history import SampleHistory
from april.util.lifetime import end_with_parent, exit_at_once, give_way, restart_delay_s
from april.util.pool import start_with_channel

log = logging.getLogger(__name__)


def rebuild_ledger(
    ledger: Ledger,
    history: SampleHistory,
    snapshots: SnapshotStore,
    events_from: Callable[[int], Iterable[tuple[Event, Reference]]],
) -> int:
    """Rebuild an empty ledger and its sample history from the newest whole snapshot and the events after it.

    `events_from(position)`: (event, reference) of each record from that position on. Returns the journal position of
    the snapshot used, 0 without a snapshot.
    """
    position, image = next(snapshots.newest_first(), (0, None))
    if image:
        history.thaw(thaw(image, ledger))
    image = None
    for event, reference in events_from(position):
        ledger.apply(event, reference)
    return position


# --- the snapshot process ---------------------------------------------------------------------------------------------


MODULE = "april.broker.snapshots"
DONE, NOT_WRITTEN, NOT_READ = 0, 3, 4
"""Exit statuses of the snapshot process. DONE: the snapshot is on disk; NOT_WRITTEN: a call failed, and may succeed
when it is tried again; NOT_READ: the journal files are damaged."""


def make_snapshot(folder: Path, until: int, rules: Rules) -> Iterator[list[int]]:
    """Make the snapshot at position `until`, in two phases around one yield.

    First it rebuilds the ledger and yields the start positions of the journal files no longer needed; when resumed, it
    deletes these files and writes the snapshot. Only files before the older of the two snapshots on disk are deleted,
    so that a failure here loses nothing. Raises JournalError if the journal cannot be read, OSError if the disk fails.
    """
    ledger, store = Ledger(rules), SnapshotStore(folder)
    history = SampleHistory(ledger)
    position = rebuild_ledger(ledger, history, store, partial(read_closed, folder, until=until))
    starts = [start for start in file_starts(folder) if start <= until]
    older = [0, *(other for other in store.positions() if other < position)][-1]
    dead = reclaimable_files(starts, older, chain(live_positions(ledger), history.logged_groups.positions()))
    yield dead
    for start in dead:
        file_path(folder, start).unlink(missing_ok=True)
    store.write(until, freeze(ledger, history.freeze()), previous=position)


def main(folder: str, position: str, rules: str) -> int:
    """Entry point of the snapshot process. Between the two phases of `make_snapshot` it sends the files to delete over
    the channel that is its stdin, and waits there for the broker's line in answer. `folder`: the journal's; `position`:
    that of the snapshot; `rules`: the ledger's, as JSON."""
    gc.disable()
    try:
        for dead in make_snapshot(Path(folder), int(position), msgspec.json.decode(rules, type=Rules)):
            with open(sys.stdin.fileno(), "wb", closefd=False) as channel:
                channel.write(msgspec.json.encode(dead) + b"\n")
            if not sys.stdin.readline():
                return NOT_WRITTEN
    except (OSError, Unreadable) as error:
        log.error("%s", error)
        return NOT_WRITTEN
    except JournalError as error:
        log.error("%s", error)
        return NOT_READ
    return DONE


# --- the broker's side ------------------------------------------------------------------------------------------------


DEADLINE_S = 600.0
"""Longest time that one snapshot may take; its process is then killed."""
POLL_S = 0.05
"""Interval at which the snapshot process is polled, seconds."""
END_S = 5.0
"""Longest wait for the end of a killed snapshot process when the broker stops."""
TRIES = 3
"""Number of snapshot processes failed in a row after which the broker makes the snapshot itself."""
ReleaseFiles = Callable[[list[int]], None]
"""Function that closes journal files, given by their start positions, so that they can be deleted."""


class Helper(Protocol):
    """Interface of a helper process that makes one snapshot."""

    def dead_files(self) -> list[int] | None:
        """Start positions of the journal files that the helper wants to delete: returned by the first call after it has
        asked, None by all others."""

    def confirm_closed(self) -> None:
        """Tell the helper that the broker has closed the files to delete."""

    def status(self) -> int | None:
        """Exit status of the helper; None while it runs."""

    def kill(self) -> None:
        """Kill the helper, without waiting for its end."""

    def close(self) -> None:
        """Kill the helper, and wait for its end."""


class Snapshots:
    """Starts and supervises the snapshot process.

    snapshots.follow(journal.file_start, journal.release_files, now)     # in each pass of the broker's loop
    """

    def __init__(self, folder: Path, rules: Rules, start: Callable[[Path, int, Rules], Helper] | None = None):
        self.folder, self.rules = folder, rules
        self.store = SnapshotStore(folder)
        self.failures = 0
        """Number of attempts to make a snapshot that have failed since the broker started."""
        self.start = start or HelperProcess
        self._helper: Helper | None = None
        self._newest = max(self.store.positions(), default=0)
        self._position = 0
        """Journal position of the snapshot in progress; of no meaning if none is."""
        self._failures_in_a_row = 0
        self._deadline = self._poll_at = self._try_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in progress."""
        return self._helper is not None

    @property
    def processes_failed(self) -> bool:
        """Whether snapshot processes have failed so often that the broker has to make the snapshot itself, from
        memory."""
        return self._failures_in_a_row >= TRIES and self._helper is None

    def follow(self, position: int, release_files: ReleaseFiles, now: float) -> None:
        """Start a process that makes the snapshot at `position`, where the newest journal file begins, or poll the
        running one. Called in each pass of the broker's loop; never waits. `release_files` closes journal files that
        the process is about to delete."""
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_S
        if self._helper:
            self._poll_helper(self._helper, release_files, now)
        elif position > self._newest and now >= self._try_at and not self.processes_failed:
            self._position, self._deadline = position, now + DEADLINE_S
            try:
                self._helper = self.start(self.folder, position, self.rules)
            except OSError as error:
                self._failed(f"no process can be started ({error})", now)

    def _poll_helper(self, helper: Helper, release_files: ReleaseFiles, now: float) -> None:
        if (dead := helper.dead_files()) is not None:
            release_files(dead)
            helper.confirm_closed()
        status = helper.status()
        if status is None:
            if now >= self._deadline:
                helper.kill()
            return
        self._helper = None
        if status == DONE:
            self._newest, self._failures_in_a_row = self._position, 0
            return
        if status == NOT_READ:
            self._failures_in_a_row = TRIES
        self._failed(f"its process ended with status {status}", now)

    def _failed(self, why: str, now: float) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        self._try_at = now + restart_delay_s(self._failures_in_a_row, TRIES)
        log.warning("snapshot at %d was not made: %s; the one before it still serves", self._position, why)

    def make_in_broker(
        self, position: int, ledger: Ledger, history: SampleHistory, release_files: ReleaseFiles
    ) -> None:
        """Make the snapshot in the broker's loop, which is blocked meanwhile; `ledger` is in the state at
        `position`."""
        self._failures_in_a_row = 0
        older = [0, 0, *self.store.positions()][-2]
        dead = reclaimable_files(
            file_starts(self.folder), older, chain(live_positions(ledger), history.logged_groups.positions())
        )
        release_files(dead)
        try:
            for start in dead:
                file_path(self.folder, start).unlink(missing_ok=True)
            self.store.write(position, freeze(ledger, history.freeze()))
            self._newest = position
        except OSError as error:
            self.failures += 1
            log.warning("snapshot at %d cannot be written (%s); the one before it still serves", position, error)

    def close(self) -> None:
        """Abandon the snapshot in progress; the next broker will make it."""
        if self._helper:
            self._helper.close()
            self._helper = None


class HelperProcess:
    """A snapshot process of the operating system, with the interface `Helper`."""

    def __init__(self, folder: Path, position: int, rules: Rules):
        """Start the process. `folder`: the journal's; `position`: journal position at which the snapshot is made;
        `rules`: the ledger's. Raises OSError if the process cannot be started."""
        words = ["-m", MODULE, str(folder), str(position), msgspec.json.encode(rules).decode()]
        self._inner, self._channel = start_with_channel(*words)
        self._output = b""

    def dead_files(self) -> list[int] | None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            self._output += self._channel.recv(1 << 20)
        line, end, self._output = self._output.partition(b"\n")
        if not end:
            self._output = line
            return None
        return msgspec.json.decode(line, type=list[int])

    def confirm_closed(self) -> None:
        with contextlib.suppress(ConnectionError):  # its status says that it has died
            self._channel.send(b"\n")

    def status(self) -> int | None:
        status = self._inner.poll()
        if status is not None:
            self._channel.close()
        return status

    def kill(self) -> None:
        self._inner.kill()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the disk holds it, and the system ends it later
            self._inner.wait(END_S)
        self.status()


if __name__ == "__main__":
    end_with_parent()
    give_way()
    exit_at_once(main(*sys.argv[1:]))
