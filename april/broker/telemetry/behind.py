"""A sink for a service that may be slow: a thread hands it the figures, one step behind the other.

The broker's loop never waits for it, except at the end, for `CLOSE_S`. What the service raises is raised to the loop at
the next step, which leaves the sink out.
"""

import queue
import threading
import uuid
from pathlib import Path
from typing import Any

from april.broker.telemetry import figures
from april.broker.telemetry.sink import Sink

PROJECT = "april-rl"
"""that runs belong to at a service which wants to know"""
WAITING = 1000
"""most that wait for the service; it has failed then"""
CLOSE_S = 30.0
"""longest wait for it at the end of a run"""

Entry = tuple[int, float, dict[str, float]]
"""step, Unix seconds, figures by name"""


class SinkBehind(Sink):
    """`open`, `write` and `end` are called in a thread of the sink's own, in this order."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self._entries: queue.Queue[Entry | None] = queue.Queue(WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Begin, or go on after a restart of the broker."""

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        """`time`: Unix seconds; `figures` of a trained step or of an evaluation."""
        raise NotImplementedError

    def end(self) -> None:
        """All is written."""

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
        """Of this run at the service, the same after a restart of the broker."""
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
