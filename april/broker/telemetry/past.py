"""What a broker has to know of the lines of metrics.jsonl that no learner can go back to: their sums, and their end.

They stand in a file beside it, so that a start reads the lines behind that place and not all of a long run. The place
is checked by the line before it. Where that is another one, or the file is damaged, all lines are read.
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
"""that alarms are shown again, beside those behind the place"""


Line = tuple[int, int]
"""its bytes, and their crc32"""


class Past(msgspec.Struct):
    offset: int = 0
    """bytes of the lines"""
    last_bytes: int = 0
    last_checksum: int = 0
    """of the last of them, crc32"""
    step: int = 0
    """of the last step among them"""
    generating_s: float = 0.0
    rollout_tokens: int = 0
    first_reward: float | None = None
    gradient_tokens: int = 0
    empty_steps: int = 0
    tokens_by_age: dict[int, int] = msgspec.field(default_factory=dict)
    evaluated: list[int] = msgspec.field(default_factory=list)
    """policy steps of the evaluations"""

    def add(self, record: dict[str, Any], line: Line) -> None:
        """The next line."""
        self.last_bytes, self.last_checksum = line
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

    def is_of(self, metrics: BinaryIO) -> bool:
        """Whether that file has the line that this ends with, where it says."""
        metrics.seek(self.offset - self.last_bytes)
        line = metrics.read(self.last_bytes)
        return line.endswith(b"\n") and line_of(line) == (self.last_bytes, self.last_checksum)


def line_of(line: bytes) -> Line:
    return len(line), crc32(line)


def write_past(metrics: Path, past: Past) -> None:
    temporary = metrics.with_name(f"{FILE}.tmp")
    temporary.write_bytes(msgspec.json.encode(past))
    temporary.replace(metrics.with_name(FILE))


def read_past(metrics: Path, last: int) -> Past:
    """Empty where there is none that holds, or where it knows of steps behind `last`."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        past = msgspec.json.decode(metrics.with_name(FILE).read_bytes(), type=Past)
        with metrics.open("rb") as file:
            if past.step <= last and past.is_of(file):
                return past
    return Past()


def read_lines(path: Path, frontier: int, offset: int = 0) -> Iterator[tuple[dict[str, Any], Line]]:
    """The lines that an earlier broker of this run wrote, from the one that begins at `offset` on. Cut off is a torn
    last line, and what follows `frontier`: by the journal those batches were never consumed, and whoever trains them
    writes their lines."""
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
            yield record, line_of(line)
            good += len(line)
