"""The file metrics.jsonl: a line waits in memory until the journal has what it describes on disk."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from april.broker.telemetry.past import (
    FIRST_LINES,
    LineCheck,
    line_check,
    read_lines,
    read_metrics_summary,
    write_metrics_summary,
)
from april.formats.metrics import is_step, line_of_evaluation

log = logging.getLogger(__name__)


class MetricsFile:
    """Appends to metrics.jsonl, and reads what earlier brokers of the run have written.

    file.append(record)                 # of a step
    file.append_evaluation(result)
    file.release(file.waiting)          # the journal is on disk: write so many bytes of lines
    file.forget(step)                   # no learner can go back to it
    """

    def __init__(self, path: Path, frontier: int, last: int):
        """`frontier`: last step that the journal knows of; lines of later steps are cut off. `last`: last step that the
        stored sums may cover."""
        self.path = path
        self.summary = read_metrics_summary(path, last)
        """Sums over the steps that are forgotten."""
        self._frontier = frontier
        self._stored_offset = self.summary.offset
        self._lines: deque[tuple[dict[str, Any], LineCheck]] = deque()
        """Records of the steps that are not forgotten, and of the evaluations between them."""
        self._waiting, self._writable = bytearray(), 0
        self._complained = False

    @property
    def waiting(self) -> int:
        """Bytes of lines that are not written yet."""
        return len(self._waiting)

    def first_steps(self) -> Iterator[dict[str, Any]]:
        """Records of the first steps, as far as `summary` covers them; at most `FIRST_LINES`."""
        steps = (record for record, _ in read_lines(self.path, self._frontier) if is_step(record))
        return islice(steps, min(FIRST_LINES, self.summary.step))

    def later_steps(self) -> Iterator[dict[str, Any]]:
        """Records of the steps after those that `summary` covers."""
        for record, line in read_lines(self.path, self._frontier, self.summary.offset):
            self._lines.append((without_lanes(record), line))
            if is_step(record):
                yield record

    def complete(self, evaluated: dict[int, dict[str, Any]]) -> None:
        """Append the evaluations, by policy step, whose lines a broker died before writing; call after
        `later_steps`."""
        known = {record["step"] for record, _ in self._lines if not is_step(record)}
        for step in sorted(evaluated.keys() - known - set(self.summary.evaluated)):
            self.append_evaluation(evaluated[step])
        self._writable = self.waiting

    def append(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        self._waiting += line
        self._lines.append((without_lanes(record), line_check(line)))

    def append_evaluation(self, result: dict[str, Any]) -> None:
        self.append(line_of_evaluation(result))

    def release(self, size: int) -> None:
        """Allow the first `size` waiting bytes to be written, and write them."""
        self._writable = size
        self.write()

    def write(self) -> None:
        """Write the released lines. If the disk refuses, they wait: metrics never stop a run."""
        if not self._writable:
            return
        try:
            with self.path.open("ab", buffering=0) as file:
                while self._writable:
                    written = file.write(self._waiting[: self._writable])
                    del self._waiting[:written]
                    self._writable -= written
        except OSError as error:
            if not self._complained:
                log.warning("%s cannot be written (%s); its lines wait", self.path, error)
        self._complained = self._writable > 0
        if self.summary.offset > self._stored_offset:
            with contextlib.suppress(OSError):  # without the sums, the next start reads all lines
                write_metrics_summary(self.path, self.summary)
                self._stored_offset = self.summary.offset

    def forget(self, step: int) -> None:
        """Drop the records up to that of `step`, and keep only their sums."""
        while self.summary.step < step:
            self.summary.add(*self._lines.popleft())


def without_lanes(record: dict[str, Any]) -> dict[str, Any]:
    """A record without its timeline spans, which are most of a line and are not read again."""
    return {key: value for key, value in record.items() if key != "lanes"}
