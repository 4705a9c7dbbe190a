"""An in-memory index of a run's kept samples: one row of numbers per sample, compact enough to filter and sort a
million of them. Files are read one by one, the newest first."""

import logging
import mmap
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from april.observe.report.samples import sample_files

log = logging.getLogger(__name__)

COLUMNS = {
    "step": np.int32,
    "group": np.int64,
    "index": np.int32,
    "fork": np.int16,
    "reward": np.float64,
    "advantage": np.float32,
    "trained": np.int8,
    "tokens": np.int32,
    "versions": np.int16,
    "oldest": np.int32,
    "newest": np.int32,
    "staleness": np.int16,
    "prompt": np.uint64,
}
"""Columns of every sample. `fork`: fork of an agent's session; `tokens`: sampled tokens; `versions`: number of policy
versions; `oldest` and `newest`: their policy steps; `staleness`: of the oldest token, in steps; `prompt`: digest of the
prompt's text."""
TEXT_COLUMNS = ("finish_reason", "discarded", "held_out", "worker")
"""Optional text columns with few distinct values, stored as indices into a list of the texts."""
FLAT_COLUMNS = ("group", "index", "reward", "advantage", "trained", "prompt")
"""Columns of a step's Parquet file that the index takes over as they are."""
NESTED_FIELDS = {"segments": ("start", "end", "step"), "spans": ("what", "where")}
"""Parquet column whose cells are lists of records -> fields of these records that the index reads."""
TIME_COLUMNS = ("opened_at", "delivered_at")
"""Two columns of Unix seconds, of which the index keeps only the difference, as the column `life_s`: from the opening
of a sample to its delivery."""
UNINDEXED_COLUMNS = ("attempts", "discarded_from", "parent", "shared")
"""Parquet columns that the index leaves out."""
MAX_EXTRA_COLUMNS = 6
"""Maximum number of numeric columns that are indexed besides the fixed ones; more are skipped."""
MAX_TEXTS = 1000
"""Maximum number of distinct texts of a text column; further texts are stored as ""."""
GROWTH = 1.25
"""Factor by which the capacity (rows) of a column's array is multiplied when it is full."""
GONE = -1
"""Value in the column `step` of a row whose file no longer exists."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Modification time and size of a file when it was read."""

    modified_ns: int
    size: int


class SampleIndex:
    """The index of one run. `column(name)` has one value per row; rows of deleted files have step GONE.

    index = SampleIndex(run_dir)
    index.scan()
    while index.advance():      # one more file; from one thread, while others read
        ...
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.count = 0
        self.columns: dict[str, np.ndarray] = {name: new_column(0, np.dtype(kind)) for name, kind in COLUMNS.items()}
        self.texts_by_column: dict[str, list[str]] = {}
        """For each text column the list of its distinct texts; the column stores indices into this list."""
        self.unreadable: dict[int, str] = {}
        """Reason why a step's file cannot be read, by step."""
        self.lock = threading.Lock()
        self._read: dict[int, tuple[FileVersion, int, int]] = {}
        """For each step whose file was read: (version of the file, index of its first row, index after its last
        row)."""
        self._pending_files: list[tuple[int, Path]] = []
        self.steps_kept = 0

    @property
    def steps_read(self) -> int:
        return len(self._read)

    @property
    def pending(self) -> bool:
        """Whether files that `scan` found have not been read yet."""
        return bool(self._pending_files)

    def column(self, name: str) -> np.ndarray:
        return self.columns[name][: self.count]

    def scan(self) -> None:
        """Find new and changed files, and drop the rows of deleted ones."""
        found = sample_files(self.run_dir)
        self.steps_kept = len(found)
        for step in [step for step in self._read if step not in found]:
            self._forget(step)
        changed = [step for step, path in found.items() if self._is_stale(step, path)]
        self._pending_files = [(step, found[step]) for step in sorted(changed)]

    def _is_stale(self, step: int, path: Path) -> bool:
        read = self._read.get(step)
        return read is None or read[0] != file_version(path)

    def advance(self) -> bool:
        """Read the newest of the files that `scan` found and that are not read yet; returns False if there is none."""
        if not self._pending_files:
            return False
        step, path = self._pending_files.pop()
        version = file_version(path)
        if version is None:
            return True
        try:
            columns, texts_by_column = read_columns(path, step)
        except Exception as error:
            self.unreadable[step] = f"{path.name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            log.warning("samples %s cannot be read: %s", path, error)
            columns, texts_by_column = {name: np.empty(0, kind) for name, kind in COLUMNS.items()}, {}
        else:
            self.unreadable.pop(step, None)
        with self.lock:
            self._forget(step)
            begin = self.count
            self._append(columns, texts_by_column)
            self._read[step] = (version, begin, self.count)
        return True

    def _forget(self, step: int) -> None:
        read = self._read.pop(step, None)
        if read:
            self.columns["step"][read[1] : read[2]] = GONE

    def _append(self, columns: dict[str, np.ndarray], texts_by_column: dict[str, list[str | None]]) -> None:
        new_rows = len(columns["step"])
        for name, texts in texts_by_column.items():
            columns[name] = self._encode_texts(name, texts)
        end = self.count + new_rows
        for name, values in columns.items():
            if name not in self.columns and (
                name in TEXT_COLUMNS or len(self.columns) < len(COLUMNS) + MAX_EXTRA_COLUMNS
            ):
                self.columns[name] = new_column(len(self.columns["step"]), values.dtype)
                self.columns[name][: self.count] = missing_value(values.dtype)
        for name, column in self.columns.items():
            if end > len(column):
                larger = new_column(max(end, int(len(column) * GROWTH)), column.dtype)
                larger[: self.count] = column[: self.count]
                self.columns[name] = column = larger
            column[self.count : end] = columns.get(name, missing_value(column.dtype))
        self.count = end

    def _encode_texts(self, name: str, values: list[str | None]) -> np.ndarray:
        texts = self.texts_by_column.setdefault(name, [""])
        numbers = {word: number for number, word in enumerate(texts)}
        for text in values:
            if (text or "") not in numbers and len(texts) < MAX_TEXTS:
                numbers[text or ""] = len(texts)
                texts.append(text or "")
        return np.array([numbers.get(text or "", 0) for text in values], np.int16)

    @property
    def extra_columns(self) -> list[str]:
        """Names of the indexed columns that are not in COLUMNS or TEXT_COLUMNS."""
        return [name for name in self.columns if name not in COLUMNS and name not in self.texts_by_column]

    def row(self, number: int) -> dict[str, Any]:
        """One row as a dictionary, with texts in place of their numbers and None for NaN."""
        row: dict[str, Any] = {}
        for name, column in self.columns.items():
            value = column[number].item()
            if name in self.texts_by_column:
                value = self.texts_by_column[name][value]
            row[name] = None if value != value else value
        return row | {"prompt": f"{row['prompt']:016x}", "place": self.position(number)[1]}

    def position(self, number: int) -> tuple[int, int]:
        """(step, row within that step's file) of a row of the index."""
        step = self.columns["step"][number].item()
        return step, number - self._read[step][1] if step != GONE else 0

    def spans(self) -> list[tuple[int, int, int]]:
        """(step, number of the first of its rows in the index, number after the last) of each step's file, the newest
        step first."""
        with self.lock:
            return sorted(((step, begin, end) for step, (_, begin, end) in self._read.items()), reverse=True)


def file_version(path: Path) -> FileVersion | None:
    """Modification time and size of a file; None if it no longer exists."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return FileVersion(status.st_mtime_ns, status.st_size)


def new_column(count: int, kind: np.dtype) -> np.ndarray:
    """A zeroed array on anonymous memory-mapped pages: pages not yet written take no memory, and a replaced column
    returns all of its memory to the system."""
    pages = mmap.mmap(-1, max(1, count * kind.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, count)


def missing_value(kind: np.dtype) -> Any:
    return np.nan if kind.kind == "f" else 0


def read_columns(path: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, list[str | None]]]:
    """(numeric columns, text columns), by name, of the file of samples of a `step`."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        text_columns = [name for name in TEXT_COLUMNS if name in schema.names]
        extra_columns = [field.name for field in schema if is_extra_column(field)][:MAX_EXTRA_COLUMNS]
        times = [name for name in TIME_COLUMNS if name in schema.names]
        has_spans = "spans" in schema.names
        fork = [name for name in ("fork",) if name in schema.names]
        flat = [*FLAT_COLUMNS, *fork, *text_columns, *extra_columns, *times]
        table = file.read([*flat, *nested_paths(file)], use_threads=False).combine_chunks()
    columns = {
        "step": np.full(len(table), step, np.int32),
        "group": numbers(table, "group", np.int64),
        "index": numbers(table, "index", np.int32),
        "fork": numbers(table, "fork", np.int16) if fork else np.zeros(len(table), np.int16),
        "reward": numbers(table, "reward", np.float64),
        "advantage": numbers(table, "advantage", np.float32),
        "trained": numbers(table, "trained", np.int8),
        **{name: numbers(table, name, np.float32) for name in extra_columns},
        **segment_columns(table["segments"], step),
        "prompt": text_digests(table["prompt"]),
    }
    if len(times) == len(TIME_COLUMNS):
        opened, delivered = (numbers(table, name, np.float64) for name in TIME_COLUMNS)
        columns["life_s"] = (delivered - opened).astype(np.float32)
    texts_by_column = {name: table[name].to_pylist() for name in text_columns}
    return columns, texts_by_column | ({"worker": last_workers(table["spans"])} if has_spans else {})


def nested_paths(file: Any) -> list[str]:
    """Paths of NESTED_FIELDS in an open Parquet `file`; fields that it lacks are left out."""
    paths = [file.schema.column(position).path for position in range(len(file.schema.names))]
    return [path for path in paths if path.split(".")[-1] in NESTED_FIELDS.get(path.split(".")[0], ())]


def last_workers(column: Any) -> list[str | None]:
    """For each sample, the name of the worker that generated the end of it; None if unknown. `column`: an Arrow column
    with a list of spans for each sample, each span with `what` was done and `where`."""
    counts, flat = flatten_lists(column)
    found: list[str | None] = [None] * len(counts)
    owners = np.repeat(np.arange(len(counts)), counts).tolist()
    for owner, what, where in zip(owners, flat.field("what").to_pylist(), flat.field("where").to_pylist(), strict=True):
        if what == "generate":
            found[owner] = where
    return found


def flatten_lists(column: Any) -> tuple[np.ndarray, Any]:
    """(length of each list, int64 [rows]; all elements concatenated) of a column of lists."""
    import pyarrow as arrow

    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, arrow.ChunkedArray) else array
    return array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), array.flatten()


def is_extra_column(field: Any) -> bool:
    """Whether a column (`field`: its entry in the Arrow schema) holds numbers, is not indexed under another rule, and
    is not a time."""
    import pyarrow.types as types

    of_numbers = types.is_integer(field.type) or types.is_floating(field.type) or types.is_boolean(field.type)
    return (
        of_numbers
        and field.name not in (*COLUMNS, *TEXT_COLUMNS, *UNINDEXED_COLUMNS)
        and not field.name.endswith("_at")
    )


def numbers(table: Any, name: str, kind: Any) -> np.ndarray:
    column = table[name].cast("float64" if np.dtype(kind).kind == "f" else "int64")
    if column.null_count:
        column = column.fill_null(np.nan if np.dtype(kind).kind == "f" else 0)
    return column.to_numpy().astype(kind)


def segment_columns(column: Any, step: int) -> dict[str, np.ndarray]:
    """The columns that follow from the samples' segments: `tokens`, `versions`, `oldest`, `newest`, `staleness`.
    `column`: the lists of segments; `step`: that of their file, numbered as in metrics.jsonl."""
    counts, flat = flatten_lists(column)
    starts, ends, steps = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end", "step"))
    tokens, versions = np.zeros(len(counts), np.int32), np.zeros(len(counts), np.int16)
    oldest = newest = np.full(len(counts), step - 1, np.int32)
    if len(steps):
        nonempty = counts > 0
        firsts = (np.cumsum(counts) - counts)[nonempty]
        tokens[nonempty] = np.add.reduceat(ends - starts, firsts)
        changes = np.concatenate([[True], steps[1:] != steps[:-1]])
        changes[firsts] = True
        versions[nonempty] = np.add.reduceat(changes.astype(np.int16), firsts)
        oldest, newest = oldest.copy(), newest.copy()
        oldest[nonempty] = np.minimum.reduceat(steps, firsts)
        newest[nonempty] = np.maximum.reduceat(steps, firsts)
    staleness = np.where(counts > 0, np.maximum(step - 1 - oldest, 0), 0).astype(np.int16)  # held out: weights `step`
    return {"tokens": tokens, "versions": versions, "oldest": oldest, "newest": newest, "staleness": staleness}


def text_digests(column: Any) -> np.ndarray:
    """A digest, uint64 [rows], of each text in an Arrow column: equal texts have equal digests."""
    import pyarrow as arrow

    encoded = column.cast(arrow.binary()).combine_chunks().dictionary_encode()
    encoded = encoded.chunk(0) if isinstance(encoded, arrow.ChunkedArray) else encoded
    digests = [blake2b(text, digest_size=8).digest() for text in encoded.dictionary.to_pylist()]
    unique_digests = np.frombuffer(b"".join(digests), np.uint64)
    return unique_digests[encoded.indices.to_numpy(zero_copy_only=False)] if len(unique_digests) else unique_digests
