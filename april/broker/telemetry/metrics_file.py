"""metrics.jsonl as the broker goes on with it: a line waits until what it says is on disk."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from april.broker.telemetry.past import FIRST_LINES, Line, line_of, read_lines, read_past, write_past
from april.formats.metrics import is_step, line_of_evaluation

log = logging.getLogger(__name__)


class MetricsFile:
    """
    file.append(record)                 # a step's, or
    file.append_evaluation(result)
    file.release(file.waiting)          # so many bytes of lines may be written: what they say is on disk
    file.forget(step)                   # no learner goes back to it
    """

    def __init__(self, path: Path, frontier: int, last: int):
        """Of what stands in it, steps up to `last` may be summed up already, and those behind `frontier` are cut."""
        self.path = path
        self.past = read_past(path, last)
        """sums of the steps that are forgotten"""
        self._frontier = frontier
        self._noted = self.past.offset
        self._lines: deque[tuple[dict[str, Any], Line]] = deque()
        """of the steps that are not, and of the evaluations between them"""
        self._waiting, self._writable = bytearray(), 0
        self._complained = False

    @property
    def waiting(self) -> int:
        """Bytes of lines that are not written."""
        return len(self._waiting)

    def first_steps(self) -> Iterator[dict[str, Any]]:
        """The first of the steps that `past` sums up."""
        steps = (record for record, _ in read_lines(self.path, self._frontier) if is_step(record))
        return islice(steps, min(FIRST_LINES, self.past.step))

    def later_steps(self) -> Iterator[dict[str, Any]]:
        """The steps behind those."""
        for record, line in read_lines(self.path, self._frontier, self.past.offset):
            self._lines.append((without_lanes(record), line))
            if is_step(record):
                yield record

    def complete(self, evaluated: dict[int, dict[str, Any]]) -> None:
        """Behind `later_steps`: the evaluations on disk, by policy step, of which a broker died before their lines."""
        known = {record["step"] for record, _ in self._lines if not is_step(record)}
        for step in sorted(evaluated.keys() - known - set(self.past.evaluated)):
            self.append_evaluation(evaluated[step])
        self._writable = self.waiting

    def append(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        self._waiting += line
        self._lines.append((without_lanes(record), line_of(line)))

    def append_evaluation(self, result: dict[str, Any]) -> None:
        self.append(line_of_evaluation(result))

    def release(self, size: int) -> None:
        self._writable = size
        self.write()

    def write(self) -> None:
        """What may be. What cannot waits: figures stop nothing."""
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
        if self.past.offset > self._noted:
            with contextlib.suppress(OSError):  # all lines are read, then
                write_past(self.path, self.past)
                self._noted = self.past.offset

    def forget(self, step: int) -> None:
        """All lines up to that of `step`, as it counts: only their sums stay."""
        while self.past.step < step:
            self.past.add(*self._lines.popleft())


def without_lanes(record: dict[str, Any]) -> dict[str, Any]:
    """What workers did is most of a line, and is not asked for again."""
    return {key: value for key, value in record.items() if key != "lanes"}
