"""Base class of metrics sinks for services that may be slow: a thread of its own writes the metrics in order.

The broker's loop never waits for the thread, except up to `CLOSE_S` at the end of the run. An exception of the service
is raised in the loop at the next step, which drops the sink.
"""

import queue
import threading
import uuid
from pathlib import Path
from typing import Any

from april.broker.telemetry import figures
from april.broker.telemetry.sink import Sink

PROJECT = "april-rl"
"""Default project, or experiment, of runs at a service."""
WAITING = 1000
"""Most entries that wait for the service; the sink fails beyond that."""
CLOSE_S = 30.0
"""Longest wait for the service at the end of a run."""

Entry = tuple[int, float, dict[str, float]]
"""Step, Unix seconds, and metrics by name."""


class BackgroundSink(Sink):
    """Calls `open`, then `write` for each entry, then `end`, in a thread of its own."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self._entries: queue.Queue[Entry | None] = queue.Queue(WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open a run at the service, or resume it after a restart of the broker."""

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        """Write the metrics of a trained step or of an evaluation; `time`: Unix seconds."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the run at the service; every entry has been written."""

    def step(self, record: dict[str, Any]) -> None:
        self._put((record["step"], record["time"], figures.of_step(record)))

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        self._put((result["step"], now, figures.of_evaluation(result)))

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"not all figures were taken within {CLOSE_S:g} s; look after the service")
        self._raise()

    def run_id(self) -> str:
        """Id of this run at the service, which stays the same over restarts of the broker."""
        path = self.run_dir / f"{self.package}.id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    def _put(self, entry: Entry | None) -> None:
        self._raise()
        self._entries.put_nowait(entry)

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _serve(self) -> None:
        try:
            self.open()
            while entry := self._entries.get():
                self.write(*entry)
            self.end()
        except Exception as error:
            self._error = error
