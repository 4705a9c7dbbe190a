"""The newest snapshot follows the newest closed file of the journal, by a process beside the broker.

The broker never waits for it. It starts it, looks at it from time to time, and lets go of the files that it names. What
goes wrong is counted and tried again, later each time. A fork of the broker would need no journal to read, but would
inherit its lock and keep the next broker out.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec

from april.broker.journal.files import file_path, file_starts, unneeded
from april.broker.journal.snapshot import SnapshotStore, freeze, live_positions
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.snapshot_process import DONE, MODULE, NOT_READ
from april.broker.telemetry.lives import Lives
from april.processes.restarts import delay_s

log = logging.getLogger(__name__)

DEADLINE_S = 600.0
"""longest that one snapshot may take; then its process is killed"""
LOOK_S = 0.05
"""how often its process is looked at"""
END_S = 5.0
"""longest wait at a stop for the process that was killed"""
TRIES = 3
"""in a row that fail, before the broker does it itself"""


class Helper(Protocol):
    """A process that makes one snapshot."""

    def dead_files(self) -> list[int] | None:
        """Where the files begin that it wants to delete, once it has said so."""

    def go_on(self) -> None:
        """The broker has let go of them."""

    def status(self) -> int | None:
        """Of its exit; None while it works."""

    def kill(self) -> None:
        """Without waiting for its end."""

    def close(self) -> None:
        """Kill it, and wait for its end."""


class Snapshots:
    """snapshots.follow(position, journal.let_go, now)     # as often as one likes"""

    def __init__(self, folder: Path, rules: Rules, start: Callable[[Path, int, Rules], Helper] | None = None):
        self.folder, self.rules = folder, rules
        self.store = SnapshotStore(folder)
        self.failures = 0
        """snapshots that could not be made since the broker started"""
        self.start = start or HelperProcess
        self._helper: Helper | None = None
        self._newest = max(self.store.positions(), default=0)
        self._position = 0
        """at which one is under way"""
        self._in_a_row = 0
        self._deadline = self._look_at = self._try_at = 0.0

    @property
    def busy(self) -> bool:
        return self._helper is not None

    @property
    def helpless(self) -> bool:
        """No process can make the next one: the broker has to, from what it has in memory."""
        return self._in_a_row >= TRIES and self._helper is None

    def follow(self, position: int, let_go: Callable[[list[int]], None], now: float) -> None:
        """Have a snapshot made at `position`, where the newest file of the journal begins, if there is none yet."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if self._helper:
            self._look_after(self._helper, let_go, now)
        elif position > self._newest and now >= self._try_at and not self.helpless:
            self._position, self._deadline = position, now + DEADLINE_S
            try:
                self._helper = self.start(self.folder, position, self.rules)
            except OSError as error:
                self._failed(f"no process can be started ({error})", now)

    def _look_after(self, helper: Helper, let_go: Callable[[list[int]], None], now: float) -> None:
        if (dead := helper.dead_files()) is not None:
            let_go(dead)
            helper.go_on()
        status = helper.status()
        if status is None:
            if now >= self._deadline:
                helper.kill()
            return
        self._helper = None
        if status == DONE:
            self._newest, self._in_a_row = self._position, 0
            return
        if status == NOT_READ:
            self._in_a_row = TRIES
        self._failed(f"its process ended with status {status}", now)

    def _failed(self, why: str, now: float) -> None:
        self.failures += 1
        self._in_a_row += 1
        self._try_at = now + delay_s(self._in_a_row, TRIES)
        log.warning("snapshot at %d was not made: %s; the one before it still serves", self._position, why)

    def make_here(self, position: int, ledger: Ledger, lives: Lives, let_go: Callable[[list[int]], None]) -> None:
        """What no process could do, in the broker's loop, which it holds up; `ledger` is at `position`."""
        self._in_a_row = 0
        older = [0, 0, *self.store.positions()][-2]
        dead = unneeded(file_starts(self.folder), older, chain(live_positions(ledger), lives.discards.positions()))
        let_go(dead)
        try:
            for start in dead:
                file_path(self.folder, start).unlink(missing_ok=True)
            self.store.write(position, freeze(ledger, lives.freeze()))
            self._newest = position
        except OSError as error:
            self.failures += 1
            log.warning("snapshot at %d cannot be written (%s); the one before it still serves", position, error)

    def close(self) -> None:
        """What is under way is given up: the next broker makes it."""
        if self._helper:
            self._helper.close()
            self._helper = None


class HelperProcess:
    def __init__(self, folder: Path, position: int, rules: Rules):
        """Raises OSError where the system has no process to give."""
        self._inner = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(folder), str(position), msgspec.json.encode(rules).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        assert self._inner.stdin and self._inner.stdout
        self._stdin, self._stdout = self._inner.stdin, self._inner.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._said = b""

    def dead_files(self) -> list[int] | None:
        self._said += self._stdout.read() or b""
        line, end, self._said = self._said.partition(b"\n")
        if not end:
            self._said = line
            return None
        return msgspec.json.decode(line, type=list[int])

    def go_on(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # its status says that it has died
            self._stdin.write(b"\n")

    def status(self) -> int | None:
        status = self._inner.poll()
        if status is not None:
            self._stdin.close()
            self._stdout.close()
        return status

    def kill(self) -> None:
        self._inner.kill()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the disk holds it, and the system ends it later
            self._inner.wait(END_S)
        self.status()
