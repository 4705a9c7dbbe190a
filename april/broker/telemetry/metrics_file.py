"""The file metrics.jsonl, and the sums over its oldest lines in `metrics.past` beside it. A line waits in memory until
the journal has the events it describes on disk."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import orjson
from zlib_ng.zlib_ng import crc32

from april.config.stored import evaluation_line, is_step

log = logging.getLogger(__name__)


# --- sums over the oldest lines ---------------------------------------------------------------------------------------


SUMMARY_FILE = "metrics.past"
"""File beside metrics.jsonl with the sums over its first lines: those of steps before which no learner can restart."""
FIRST_LINES = 10
"""Number of first step records that alarms see again at a start of the broker, besides the records that are not summed
yet."""

LineCheck = tuple[int, int]
"""(length of a line in bytes, crc32 of the line)."""


class StepSums(msgspec.Struct):
    """Sums over the records of trained steps."""

    generating_s: float = 0.0
    rollout_tokens: int = 0
    first_reward: float | None = None
    """Mean reward of step 1."""
    gradient_tokens: int = 0
    """Trained tokens that had a gradient; like `empty_steps`, only if the learner reports them."""
    empty_steps: int = 0
    """Steps in which no token had a gradient."""
    tokens_by_age: dict[int, int] = {}
    """Trained tokens by staleness in steps."""

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of a step."""
        self.generating_s += record["rollout_s"]
        self.rollout_tokens += record["rollout_tokens"]
        if record["step"] == 1:
            self.first_reward = record["reward"]
        if (share := (record.get("gradient") or {}).get("tokens")) is not None:
            self.gradient_tokens += round(share * record["tokens"])
            self.empty_steps += share == 0
        for age, tokens in record["staleness"]["tokens_by_age"].items():
            self.tokens_by_age[int(age)] = self.tokens_by_age.get(int(age), 0) + tokens


class MetricsSummary(StepSums):
    """Sums over the first lines of metrics.jsonl: those of steps before which no learner can restart."""

    offset: int = 0
    """Total length of the summed lines in bytes: offset of the first line that is not summed."""
    last_bytes: int = 0
    """Length of the last summed line in bytes."""
    last_checksum: int = 0
    """Crc32 of the last summed line."""
    step: int = 0
    """Policy step of the last summed step record."""
    evaluated: list[int] = []
    """Policy steps of the evaluations among the summed lines."""

    def add_line(self, record: dict[str, Any], check: LineCheck) -> None:
        """Add the next line of metrics.jsonl to the sums."""
        self.last_bytes, self.last_checksum = check
        self.offset += self.last_bytes
        if is_step(record):
            self.step = record["step"]
            self.add(record)
        else:
            self.evaluated.append(record["step"])

    def matches(self, metrics: BinaryIO) -> bool:
        """Whether metrics.jsonl still has the last summed line at the recorded offset, by length and checksum."""
        metrics.seek(self.offset - self.last_bytes)
        line = metrics.read(self.last_bytes)
        return line.endswith(b"\n") and line_check(line) == (self.last_bytes, self.last_checksum)


def line_check(line: bytes) -> LineCheck:
    return len(line), crc32(line)


def write_metrics_summary(metrics: Path, summary: MetricsSummary) -> None:
    """Write the sums to the file `SUMMARY_FILE` beside metrics.jsonl, whose path is `metrics`."""
    temporary = metrics.with_name(f"{SUMMARY_FILE}.tmp")
    temporary.write_bytes(msgspec.json.encode(summary))
    temporary.replace(metrics.with_name(SUMMARY_FILE))


def read_metrics_summary(metrics: Path, last: int) -> MetricsSummary:
    """Read the stored sums. If there are no valid ones, or they cover steps after `last`, the result is empty."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        summary = msgspec.json.decode(metrics.with_name(SUMMARY_FILE).read_bytes(), type=MetricsSummary)
        with metrics.open("rb") as file:
            if summary.step <= last and summary.matches(file):
                return summary
    return MetricsSummary()


def read_lines(path: Path, frontier: int, offset: int = 0) -> Iterator[tuple[dict[str, Any], LineCheck]]:
    """Read the records of metrics.jsonl from byte `offset` on, each with length and checksum of its line.

    Truncates the file before a torn last line, and before the first step after `frontier`: by the journal later batches
    are not consumed, so they will be trained and recorded again.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        good = file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                os.truncate(path, good)
                return
            record = orjson.loads(line)
            if record["step"] > frontier:
                log.warning("%s is cut behind step %d, the last that the journal knows of", path, frontier)
                os.truncate(path, good)
                return
            yield record, line_check(line)
            good += len(line)


# --- the file ---------------------------------------------------------------------------------------------------------


class MetricsFile:
    """Appends to metrics.jsonl, and reads what earlier brokers of the run have written.

    file.append(record)                 # of a step
    file.append_evaluation(result)
    file.release(file.waiting)          # the journal is on disk: write so many bytes of lines
    file.forget(step)                   # no learner can go back to it
    """

    def __init__(self, path: Path, frontier: int, last: int):
        """`frontier`: last step that the journal knows of; lines of later steps are cut off. `last`: last step that the
        sums may cover."""
        self.path = path
        self.summary = read_metrics_summary(path, last)
        """Sums over the steps whose records were dropped by `forget`."""
        self._frontier = frontier
        self._stored_offset = self.summary.offset
        self._lines: deque[tuple[dict[str, Any], LineCheck]] = deque()
        """(record, length and checksum of its line) of each step that is not summed yet, and of the evaluations in
        between."""
        self._waiting, self._writable = bytearray(), 0
        self._complained = False

    @property
    def waiting(self) -> int:
        """Number of bytes in lines that are not written yet."""
        return len(self._waiting)

    def first_steps(self) -> Iterator[dict[str, Any]]:
        """Records of the first steps, at most `FIRST_LINES`, as far as `summary` covers them."""
        steps = (record for record, _ in read_lines(self.path, self._frontier) if is_step(record))
        return islice(steps, min(FIRST_LINES, self.summary.step))

    def later_steps(self) -> Iterator[dict[str, Any]]:
        """Records of the steps that `summary` does not cover."""
        for record, line in read_lines(self.path, self._frontier, self.summary.offset):
            self._lines.append((without_lanes(record), line))
            if is_step(record):
                yield record

    def complete(self, evaluated: dict[int, dict[str, Any]]) -> None:
        """Append a line for each evaluation (result by policy step) whose line an earlier broker did not write before
        it died; call after `later_steps`."""
        known = {record["step"] for record, _ in self._lines if not is_step(record)}
        for step in sorted(evaluated.keys() - known - set(self.summary.evaluated)):
            self.append_evaluation(evaluated[step])
        self._writable = self.waiting

    def append(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        self._waiting += line
        self._lines.append((without_lanes(record), line_check(line)))

    def append_evaluation(self, result: dict[str, Any]) -> None:
        self.append(evaluation_line(result))

    def release(self, size: int) -> None:
        """Permit the first `size` waiting bytes to be written, and write them."""
        self._writable = size
        self.write()

    def write(self) -> None:
        """Write the permitted lines. If the disk refuses, they keep waiting: metrics never stop a run."""
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
        """Drop the records up to that of `step`, and add them to the sums."""
        while self.summary.step < step:
            self.summary.add_line(*self._lines.popleft())


def without_lanes(record: dict[str, Any]) -> dict[str, Any]:
    """Copy of a step's record without its timeline spans, which are most of the line and are not needed again."""
    return {key: value for key, value in record.items() if key != "lanes"}
