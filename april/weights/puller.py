"""The source of a worker that reads snapshots of weights: no learner takes part, so a worker that is started while
there is none begins with the newest snapshot too.

    puller.offer(folders)           # whenever the broker says so
    staged = puller.take()
"""

import logging
import threading
from collections.abc import Callable, Sequence

from april.util import clock
from april.util.lifetime import PartThread
from april.util.objects import StoreError
from april.weights.deltas import WrongBase
from april.weights.folders import ReadSnapshot, SnapshotFolders
from april.weights.snapshot import ReusedBuffers, SnapshotError
from april.weights.source import StagedWeights, WeightSource
from april.wire.message import Version
from april.wire.training import WeightFolder

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds until a worker tries again a snapshot that it could not use."""
POLL_S = 0.5
"""Interval at which a worker checks whether its engine is up, or a snapshot is to be tried again, seconds."""


class SnapshotPuller(WeightSource):
    """Reads the newest snapshot that the broker has announced; if that cannot be used, the newest older one that
    can."""

    def __init__(self, folders: SnapshotFolders, timeout_s: float, up: Callable[[], bool] = lambda: True):
        """`folders`: the run's snapshots. `timeout_s`: longest time to read a snapshot. `up`: whether the engine is up;
        nothing is read while it is down."""
        super().__init__()
        self.folders, self.timeout_s, self.up = folders, timeout_s, up
        self.buffers = ReusedBuffers()
        self._changed = threading.Condition()
        self._offered: list[WeightFolder] = []
        self._taken: Version | None = None
        """Version of the snapshot that was read last; None if there is none, or the engine has lost or refused that
        version."""
        self._held: ReadSnapshot | None = None
        """The snapshot that was read last, kept as the base of the next delta; None if the run writes no deltas."""
        self._read_again: WeightFolder | None = None
        """The snapshot for which its whole chain (the last whole snapshot and the deltas since) was read again, because
        its delta did not fit the snapshot in `_held`."""
        self._loading: Version | None = None
        """Version that the main loop has last taken to load it into the engine."""
        self._not_before = 0.0
        """Time before which nothing is read, Unix time in seconds."""
        self._closed = False
        self._thread = PartThread("weights", self._run)
        self._thread.start()

    def offer(self, folders: Sequence[WeightFolder]) -> None:
        with self._changed:
            self._offered, self._not_before = list(folders), 0.0
            self._changed.notify()

    def take(self) -> StagedWeights | None:
        if staged := super().take():
            self._loading = staged.version
        return staged

    def refuse(self, why: str, wrong: bool = False) -> None:
        with self._changed:
            if self._loading:
                self.refused.put((self._loading, why))
            if self._taken == self._loading:  # otherwise a newer one has been read meanwhile
                self._taken = self._held = None
            self._not_before = clock.now() + RETRY_S

    def forget(self) -> None:
        super().forget()
        with self._changed:
            self._taken = self._held = None
            self._changed.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                wanted = self._wanted()
                if not wanted:
                    self._changed.wait(POLL_S)
            if wanted:
                self._pull(wanted)

    def _wanted(self) -> list[WeightFolder]:
        """The snapshots to try now, the newest first: those that are newer than the one read last."""
        if clock.now() < self._not_before or not self.up():
            return []
        versions = [folder.version for folder in self._offered]
        return self._offered[: versions.index(self._taken)] if self._taken in versions else self._offered

    def _pull(self, wanted: list[WeightFolder]) -> None:
        """Stage the first of the snapshots `wanted` that can be used. If one of the deltas that a snapshot rests on
        cannot be used, stage the last snapshot before that delta. A snapshot that cannot be used is tried again after
        `RETRY_S`."""
        for folder in wanted:
            started_at, before, failed = clock.now(), self._taken, False
            found, self._held = self._held, None  # two are in memory at most: the last one read, and the next
            at_hand = found.folder if found else None
            try:
                chain = [*self.folders.chain(folder), folder]
                for each in chain[chain.index(at_hand) + 1 if at_hand in chain else 0 :]:
                    found = self.folders.read(each, self.buffers, self.timeout_s, found)
            except (SnapshotError, StoreError) as error:
                log.error("weights %s are not used: %s", folder.version, error)
                self.refused.put((folder.version, str(error)))
                with self._changed:
                    self._not_before = clock.now() + RETRY_S
                failed = True
                if isinstance(error, WrongBase) and found and found.folder == at_hand and folder != self._read_again:
                    found, self._read_again = None, folder
            is_newer = found and found.folder != at_hand and not (failed and before and found.folder.version <= before)
            with self._changed:
                self._held = found if self.folders.has_deltas else None
                if found and is_newer:
                    self._taken = found.folder.version
            if found and is_newer:
                version, digest = found.folder.version, found.folder.digest
                self.stage(StagedWeights(version, found.tensors, started_at, canary=found.canary, digest=digest))
                return
