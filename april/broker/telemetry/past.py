"""Sums over the lines of metrics.jsonl that no learner can go back to, stored in `metrics.past` beside it.

With them a broker starts by reading only the lines behind the summed ones, not all of a long run. The last summed line
is checked against metrics.jsonl. If it differs, or the stored sums are damaged, all lines are read.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import orjson
from zlib_ng.zlib_ng import crc32

from april.formats.metrics import is_step

log = logging.getLogger(__name__)

FILE = "metrics.past"
FIRST_LINES = 10
"""First steps whose records are replayed to alarms at a start, besides those that are not summed."""


LineCheck = tuple[int, int]
"""Bytes of a line, and their crc32."""


class MetricsSummary(msgspec.Struct):
    """Sums over the first lines of metrics.jsonl."""

    offset: int = 0
    """Bytes of the summed lines."""
    last_bytes: int = 0
    """Bytes of the last summed line."""
    last_checksum: int = 0
    """crc32 of the last summed line."""
    step: int = 0
    """Last step among the summed lines."""
    generating_s: float = 0.0
    rollout_tokens: int = 0
    first_reward: float | None = None
    gradient_tokens: int = 0
    empty_steps: int = 0
    tokens_by_age: dict[int, int] = msgspec.field(default_factory=dict)
    evaluated: list[int] = msgspec.field(default_factory=list)
    """Policy steps of the evaluations among the summed lines."""

    def add(self, record: dict[str, Any], check: LineCheck) -> None:
        """Add the next line to the sums."""
        self.last_bytes, self.last_checksum = check
        self.offset += self.last_bytes
        if not is_step(record):
            self.evaluated.append(record["step"])
            return
        self.step = record["step"]
        self.generating_s += record["rollout_s"]
        self.rollout_tokens += record["rollout_tokens"]
        if record["step"] == 1:
            self.first_reward = record["reward"]
        if (share := (record.get("gradient") or {}).get("tokens")) is not None:
            self.gradient_tokens += round(share * record["tokens"])
            self.empty_steps += share == 0
        for age, tokens in record["staleness"]["tokens_by_age"].items():
            self.tokens_by_age[int(age)] = self.tokens_by_age.get(int(age), 0) + tokens

    def matches(self, metrics: BinaryIO) -> bool:
        """Whether metrics.jsonl has the last summed line at its offset."""
        metrics.seek(self.offset - self.last_bytes)
        line = metrics.read(self.last_bytes)
        return line.endswith(b"\n") and line_check(line) == (self.last_bytes, self.last_checksum)


def line_check(line: bytes) -> LineCheck:
    return len(line), crc32(line)


def write_metrics_summary(metrics: Path, summary: MetricsSummary) -> None:
    """Store the sums beside metrics.jsonl, whose path is `metrics`."""
    temporary = metrics.with_name(f"{FILE}.tmp")
    temporary.write_bytes(msgspec.json.encode(summary))
    temporary.replace(metrics.with_name(FILE))


def read_metrics_summary(metrics: Path, last: int) -> MetricsSummary:
    """Read the stored sums; empty ones if none are valid, or if they cover steps after `last`."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        summary = msgspec.json.decode(metrics.with_name(FILE).read_bytes(), type=MetricsSummary)
        with metrics.open("rb") as file:
            if summary.step <= last and summary.matches(file):
                return summary
    return MetricsSummary()


def read_lines(path: Path, frontier: int, offset: int = 0) -> Iterator[tuple[dict[str, Any], LineCheck]]:
    """Read the records of metrics.jsonl from byte `offset` on, each with its check.

    Truncates the file before a torn last line, and before the first step after `frontier`: the journal does not have
    those batches as consumed, so they are trained and recorded again.
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
