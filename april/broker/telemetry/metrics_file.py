"""The file metrics.jsonl, and the sums over its oldest lines in `metrics.past` beside it. A line waits in memory until
the journal has the events it describes on disk. What is damaged in these files, or in `summary.json`, is set aside."""

import contextlib
import io
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import orjson
from zlib_ng.zlib_ng import crc32

from april.config.stored import evaluation_line, is_step
from april.util.files import replace_file

log = logging.getLogger(__name__)


# --- sums over the oldest lines ---------------------------------------------------------------------------------------


SUMMARY_FILE = "metrics.past"
"""File beside metrics.jsonl with the sums over its first lines: those of steps before which no learner can restart."""
FIRST_LINES = 10
"""Most records of the run's first steps that alarms see again when a broker starts. They also see all records that are
not summed yet."""

SFT_COUNTS = ("rows", "tokens", "too_long", "bad_rows")
"""Names of the counts of supervised conversations that were trained beside samples; the learner reports count NAME as
the metric sft_NAME."""

LineCheck = tuple[int, int]
"""(length of a line in bytes, crc32 of the line)."""


class StepSums(msgspec.Struct):
    """Sums over the records of trained steps, for summary.json."""

    generating_s: float = 0.0
    rollout_tokens: int = 0
    first_reward: float | None = None
    """Mean reward of the run's first step; None before it is recorded."""
    gradient_tokens: int = 0
    """Trained tokens that had a gradient. This and `empty_steps` stay 0 if the learner does not report such tokens."""
    empty_steps: int = 0
    """Steps in which no token had a gradient."""
    tokens_by_age: dict[int, int] = {}
    """Trained tokens by staleness in steps."""
    sft_rows: int = 0
    """Conversations trained together with samples. Neither this nor `sft_tokens` counts steps that the learner skipped
    because loss or gradient was not finite."""
    sft_tokens: int = 0
    """Trained tokens of conversations."""
    sft_too_long: int = 0
    sft_bad_rows: int = 0
    """`sft_too_long`, `sft_bad_rows`: conversations left out because they were too long, or invalid."""

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of a step."""
        self.generating_s += record["rollout_s"]
        self.rollout_tokens += record["rollout_tokens"]
        if record["step"] == 1:
            self.first_reward = record["reward"]
        if (share := (record.get("gradient") or {}).get("tokens")) is not None:
            self.gradient_tokens += round(share * record["tokens"])
            self.empty_steps += share == 0
        if not record["learner"].get("nonfinite"):
            for name in SFT_COUNTS:
                key = f"sft_{name}"
                setattr(self, key, getattr(self, key) + round(record["learner"].get(key) or 0))
        for age, tokens in record["staleness"]["tokens_by_age"].items():
            self.tokens_by_age[int(age)] = self.tokens_by_age.get(int(age), 0) + tokens

    @property
    def conversations(self) -> dict[str, int] | None:
        """Counts of conversations for summary.json, by name (`SFT_COUNTS`); None if all are 0."""
        counts = {name: getattr(self, f"sft_{name}") for name in SFT_COUNTS}
        return counts if any(counts.values()) else None


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
        """Add the next line of metrics.jsonl, with its length and checksum, to the sums."""
        self.last_bytes, self.last_checksum = check
        self.offset += self.last_bytes
        if is_step(record):
            self.step = record["step"]
            self.add(record)
        else:
            self.evaluated.append(record["step"])

    def matches(self, metrics: BinaryIO) -> bool:
        """Whether metrics.jsonl still has the last summed line at the recorded offset, by length and checksum."""
        if not 0 < self.last_bytes <= self.offset <= os.fstat(metrics.fileno()).st_size:
            return False
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
    """Read the stored sums beside metrics.jsonl, whose path is `metrics`. If there are no valid ones, or they cover
    steps after `last`, the result is empty."""
    with contextlib.suppress(OSError, msgspec.DecodeError):  # they are made anew from the lines
        summary = msgspec.json.decode(metrics.with_name(SUMMARY_FILE).read_bytes(), type=MetricsSummary)
        with metrics.open("rb") as file:
            if summary.step <= last and summary.matches(file):
                return summary
    return MetricsSummary()


# --- lines ------------------------------------------------------------------------------------------------------------


BAD_LINES_FILE = "metrics.bad"
"""File beside metrics.jsonl with the lines that were taken out of it, as they were no records."""
RECORD_BEGINS = b'{"step":'
"""First bytes of every record."""


class Ages(msgspec.Struct):
    tokens_by_age: dict[int, int]


class StepLine(msgspec.Struct):
    """Fields of a step's record that a restarted broker reads."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    time: float
    reward: float | None
    tokens: int
    rollout_s: float
    rollout_tokens: int
    staleness: Ages
    learner: dict[str, Any]
    gradient: dict[str, float | None] | None = None


class EvaluationLine(msgspec.Struct):
    """Fields that every record of an evaluation has."""

    step: int
    time: float
    evaluation: dict[str, Any]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a step or an evaluation in a line of metrics.jsonl; None if it is neither."""
    try:
        record = orjson.loads(line)
        if isinstance(record, dict):
            msgspec.json.decode(line, type=StepLine if is_step(record) else EvaluationLine)
            return record
    except (orjson.JSONDecodeError, msgspec.DecodeError):
        pass
    return None


def set_bad_lines_aside(path: Path, offset: int = 0) -> None:
    """Move lines that are no records, from byte `offset` of metrics.jsonl on, to `BAD_LINES_FILE` beside it. A record
    that follows a torn one in the same line gets a line of its own."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        if not any(map(record_in, file)):
            return
        file.seek(0)
        before = file.read(offset)
        pieces = [(line[: (begin := record_in(line))], line[begin:]) for line in file]
    bad = [piece for piece, _ in pieces if piece]
    log.warning("%s: %d lines are no records; they are in %s", path, len(bad), BAD_LINES_FILE)
    with path.with_name(BAD_LINES_FILE).open("ab") as file:
        file.writelines(piece.removesuffix(b"\n") + b"\n" for piece in bad)
    replace_file(path, before + b"".join(record for _, record in pieces))


def record_in(line: bytes) -> int:
    """Offset in a line at which its record begins; the line's length if it holds none. A line without a newline at its
    end counts as a record that begins at 0: it is torn, or still being written."""
    if not line.endswith(b"\n") or parse_line(line):
        return 0
    begin = line.find(RECORD_BEGINS, 1)
    while begin >= 0 and not parse_line(line[begin:]):
        begin = line.find(RECORD_BEGINS, begin + 1)
    return begin if begin >= 0 else len(line)


def cut_lines(path: Path, frontier: int, offset: int = 0) -> set[int]:
    """Truncate metrics.jsonl before a torn last line, and before the first record of a step after `frontier`; returns
    the steps whose records are left. Lines before byte `offset` are not read.

    By the journal the batches after `frontier` are not consumed, so they will be trained and recorded again.
    """
    steps: set[int] = set()
    if not path.exists():
        return steps
    with path.open("rb") as file:
        good = file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                os.truncate(path, good)
                break
            record = parse_line(line)
            if record and record["step"] > frontier:
                log.warning("%s is cut behind step %d, the last that the journal knows of", path, frontier)
                os.truncate(path, good)
                break
            if record and is_step(record):
                steps.add(record["step"])
            good += len(line)
    return steps


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], LineCheck]]:
    """Read the records of metrics.jsonl from byte `offset` on, each with length and checksum of its line. A line that
    is no record is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if record := parse_line(line):
                yield record, line_check(line)


def restore_steps(path: Path, offset: int, recorded: dict[int, bytes]) -> None:
    """Insert the lines `recorded` of steps, by policy step, into metrics.jsonl, each before the first later step. No
    line before byte `offset` is about a later step."""
    log.warning("%s lacks the lines of steps %s; they are written anew", path, ", ".join(map(str, recorded)))
    data = path.read_bytes() if path.exists() else b""
    lines = io.BytesIO(data[offset:]).readlines()
    for step, line in sorted(recorded.items()):
        known = (parse_line(each) for each in lines)
        later = (at for at, record in enumerate(known) if record and is_step(record) and record["step"] > step)
        lines.insert(next(later, len(lines)), line)
    replace_file(path, data[:offset] + b"".join(lines))


# --- the file ---------------------------------------------------------------------------------------------------------


class MetricsFile:
    """Appends to metrics.jsonl, and reads what earlier brokers of the run have written.

    file.append(record)                 # of a step
    file.append_evaluation(result)
    file.release(file.waiting)          # the journal is on disk: write so many bytes of lines
    file.forget(step)                   # no learner can go back to it
    """

    def __init__(
        self,
        path: Path,
        frontier: int,
        last: int,
        recorded: Collection[int] = (),
        line_of: Callable[[int], bytes | None] = lambda step: None,
    ):
        """`frontier`: last step that the journal has; lines of later steps are cut off. `last`: last step that the
        stored sums may cover; otherwise they are made anew. `recorded`: policy steps whose lines the journal has.
        `line_of(step)`: such a line, None if it is damaged; a line that metrics.jsonl lacks is restored from it."""
        self.path = path
        self.summary = read_metrics_summary(path, last)
        """Sums over the steps whose records were dropped by `forget`."""
        set_bad_lines_aside(path, self.summary.offset)
        lacking = set(recorded) - cut_lines(path, frontier, self.summary.offset)
        if restored := {step: line for step in sorted(lacking) if (line := line_of(step))}:
            restore_steps(path, self.summary.offset, restored)
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
        """Records of the run's first steps, read from the file: at most `FIRST_LINES`, and only of steps that `summary`
        covers."""
        steps = (record for record, _ in read_lines(self.path) if is_step(record))
        return islice(steps, min(FIRST_LINES, self.summary.step))

    def later_steps(self) -> Iterator[dict[str, Any]]:
        """Records of the steps that `summary` does not cover, read from the file; they are also kept in memory."""
        for record, line in read_lines(self.path, self.summary.offset):
            self._lines.append((without_timeline(record), line))
            if is_step(record):
                yield record

    def complete(self, evaluated: dict[int, dict[str, Any]]) -> None:
        """Append a line for each evaluation whose line an earlier broker did not write before it died; call after
        `later_steps`. `evaluated`: policy step -> result of its evaluation."""
        known = {record["step"] for record, _ in self._lines if not is_step(record)}
        for step in sorted(evaluated.keys() - known - set(self.summary.evaluated)):
            self.append_evaluation(evaluated[step])
        self._writable = self.waiting

    def append(self, record: dict[str, Any]) -> bytes:
        """Append a record to the lines that wait to be written; returns its line, JSON with a newline."""
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        self._waiting += line
        self._lines.append((without_timeline(record), line_check(line)))
        return line

    def append_evaluation(self, result: dict[str, Any]) -> None:
        self.append(evaluation_line(result))

    def release(self, size: int) -> None:
        """Permit the first `size` bytes of the waiting lines to be written, and write them."""
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
        while self.summary.step < step and self._lines and self._lines[0][0]["step"] <= step:
            self.summary.add_line(*self._lines.popleft())


def without_timeline(record: dict[str, Any]) -> dict[str, Any]:
    """Copy of a step's record without its timeline spans, which are most of the line and are not needed again."""
    return {key: value for key, value in record.items() if key != "timeline"}


# --- summary.json -----------------------------------------------------------------------------------------------------


class EarlierTokens(msgspec.Struct):
    """Token counts of earlier brokers of the run: tokens that the broker refused (`refused`), and tokens that workers
    sampled and the broker neither acknowledged nor refused (`emitted_unacked`)."""

    emitted_unacked: int = 0
    refused: int = 0


class EarlierCounts(msgspec.Struct):
    """Figures of summary.json that a restarted broker goes on counting from; no other file holds them."""

    wall_s: float = 0.0
    buffer_peak: dict[str, int] = msgspec.field(default_factory=dict)
    tokens: EarlierTokens = msgspec.field(default_factory=EarlierTokens)
    replays: dict[str, int] = msgspec.field(default_factory=dict)


def earlier_counts(summary: dict[str, Any]) -> EarlierCounts:
    """Counts of earlier brokers of the run, from the content of summary.json; zeros if it is damaged."""
    try:
        return msgspec.convert(summary, EarlierCounts)
    except msgspec.ValidationError as error:
        log.warning("summary.json is damaged (%s); what it counted before this start is left out", error)
        return EarlierCounts()
