"""Which samples a run has kept: a row of small numbers each, so that a million of them are filtered and sorted in
memory, file by file as they are read, the newest first."""

import logging
import mmap
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from april.report.samples import files

log = logging.getLogger(__name__)

KNOWN = {
    "step": np.int32,
    "group": np.int64,
    "index": np.int32,
    "branch": np.int16,
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
"""columns of every sample: `branch`, of the session of an agent; `tokens`, those that the policy has sampled; `oldest`
and `newest`, steps of its versions; `staleness`, of its oldest token; `prompt`, a digest of its prompt's text"""
WORDS = ("finish_reason", "discarded", "worker")
"""columns of few different words, where they are there"""
READ = ("group", "index", "reward", "advantage", "trained", "prompt")
WITHIN = {"segments": ("start", "end", "step"), "stays": ("what", "where")}
"""of columns of lists, what is read"""
LIFE = ("opened_at", "delivered_at")
"""columns of Unix seconds, of which the index keeps the distance alone, as `life_s`"""
PLAIN = ("attempts", "discarded_from", "parent", "shared")
"""columns that are not searched for"""
MOST_FURTHER = 6
"""columns of one number a sample beyond those of April 0.2's files; more are not searched for"""
MOST_WORDS = 1000
GROWTH = 1.25
GONE = -1
"""step of a row whose file is no longer there"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Of a file, as it was read."""

    modified_ns: int
    size: int


class SampleIndex:
    """`column(name)` is an array with a value a row; rows of files that are gone have step GONE.

    index = SampleIndex(run_dir)
    while index.advance():      # one file more; from one thread, while others read
        ...
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.count = 0
        self.columns: dict[str, np.ndarray] = {name: room(0, np.dtype(kind)) for name, kind in KNOWN.items()}
        self.words: dict[str, list[str]] = {}
        """of each column of words, in the order of their numbers"""
        self.unreadable: dict[int, str] = {}
        """steps whose file cannot be read, and why"""
        self.lock = threading.Lock()
        self._read: dict[int, tuple[Stamp, int, int]] = {}
        """by step: the file that was read, and its rows"""
        self._todo: list[tuple[int, Path]] = []
        self.steps_kept = 0

    @property
    def steps_read(self) -> int:
        return len(self._read)

    @property
    def pending(self) -> bool:
        """Whether files that were found have yet to be read."""
        return bool(self._todo)

    def column(self, name: str) -> np.ndarray:
        return self.columns[name][: self.count]

    def look(self) -> None:
        """Find files that are new, changed or gone."""
        found = files(self.run_dir)
        self.steps_kept = len(found)
        for step in [step for step in self._read if step not in found]:
            self._forget(step)
        changed = [step for step, path in found.items() if self._stale(step, path)]
        self._todo = [(step, found[step]) for step in sorted(changed)]

    def _stale(self, step: int, path: Path) -> bool:
        read = self._read.get(step)
        return read is None or read[0] != stamp_of(path)

    def advance(self) -> bool:
        """Read one of the files that `look` has found; whether there was one."""
        if not self._todo:
            return False
        step, path = self._todo.pop()
        stamp = stamp_of(path)
        if stamp is None:
            return True
        try:
            columns, words = describe(path, step)
        except Exception as error:
            self.unreadable[step] = f"{path.name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            log.warning("samples %s cannot be read: %s", path, error)
            columns, words = {name: np.empty(0, kind) for name, kind in KNOWN.items()}, {}
        else:
            self.unreadable.pop(step, None)
        with self.lock:
            self._forget(step)
            begin = self.count
            self._append(columns, words)
            self._read[step] = (stamp, begin, self.count)
        return True

    def _forget(self, step: int) -> None:
        read = self._read.pop(step, None)
        if read:
            self.columns["step"][read[1] : read[2]] = GONE

    def _append(self, columns: dict[str, np.ndarray], words: dict[str, list[str | None]]) -> None:
        more = len(columns["step"])
        for name, texts in words.items():
            columns[name] = self._numbered(name, texts)
        end = self.count + more
        for name, values in columns.items():
            if name not in self.columns and (name in WORDS or len(self.columns) < len(KNOWN) + MOST_FURTHER):
                self.columns[name] = room(len(self.columns["step"]), values.dtype)
                self.columns[name][: self.count] = lacking(values.dtype)
        for name, column in self.columns.items():
            if end > len(column):
                larger = room(max(end, int(len(column) * GROWTH)), column.dtype)
                larger[: self.count] = column[: self.count]
                self.columns[name] = column = larger
            column[self.count : end] = columns.get(name, lacking(column.dtype))
        self.count = end

    def _numbered(self, name: str, texts: list[str | None]) -> np.ndarray:
        known = self.words.setdefault(name, [""])
        numbers = {word: number for number, word in enumerate(known)}
        for text in texts:
            if (text or "") not in numbers and len(known) < MOST_WORDS:
                numbers[text or ""] = len(known)
                known.append(text or "")
        return np.array([numbers.get(text or "", 0) for text in texts], np.int16)

    @property
    def further(self) -> list[str]:
        """Columns of numbers that this April does not know."""
        return [name for name in self.columns if name not in KNOWN and name not in self.words]

    def row(self, number: int) -> dict[str, Any]:
        """One row by its columns, words as words."""
        row: dict[str, Any] = {}
        for name, column in self.columns.items():
            value = column[number].item()
            if name in self.words:
                value = self.words[name][value]
            row[name] = None if value != value else value
        return row | {"prompt": f"{row['prompt']:016x}", "place": self.place(number)[1]}

    def place(self, number: int) -> tuple[int, int]:
        """Of a row: its step, and which row of that step's file it is."""
        step = self.columns["step"][number].item()
        return step, number - self._read[step][1] if step != GONE else 0

    def spans(self) -> list[tuple[int, int, int]]:
        """(step, first row, end) of each file, the newest step first."""
        with self.lock:
            return sorted(((step, begin, end) for step, (_, begin, end) in self._read.items()), reverse=True)


def stamp_of(path: Path) -> Stamp | None:
    """None where the file is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return Stamp(found.st_mtime_ns, found.st_size)


def room(count: int, kind: np.dtype) -> np.ndarray:
    """Of the system's own pages: what is not written yet takes no memory, and a column that was too short gives all of
    its back."""
    pages = mmap.mmap(-1, max(1, count * kind.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, count)


def lacking(kind: np.dtype) -> Any:
    return np.nan if kind.kind == "f" else 0


def describe(path: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, list[str | None]]]:
    """A file's columns of numbers, and its columns of words."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        words = [name for name in WORDS if name in schema.names]
        further = [field.name for field in schema if is_further(field)][:MOST_FURTHER]
        times = [name for name in LIFE if name in schema.names]
        stays = "stays" in schema.names
        branch = [name for name in ("branch",) if name in schema.names]
        flat = [*READ, *branch, *words, *further, *times]
        table = file.read([*flat, *leaves(file)], use_threads=False).combine_chunks()
    columns = {
        "step": np.full(len(table), step, np.int32),
        "group": numbers(table, "group", np.int64),
        "index": numbers(table, "index", np.int32),
        "branch": numbers(table, "branch", np.int16) if branch else np.zeros(len(table), np.int16),
        "reward": numbers(table, "reward", np.float64),
        "advantage": numbers(table, "advantage", np.float32),
        "trained": numbers(table, "trained", np.int8),
        **{name: numbers(table, name, np.float32) for name in further},
        **of_segments(table["segments"], step),
        "prompt": digests_of(table["prompt"]),
    }
    if len(times) == len(LIFE):
        opened, delivered = (numbers(table, name, np.float64) for name in LIFE)
        columns["life_s"] = (delivered - opened).astype(np.float32)
    said = {name: table[name].to_pylist() for name in words}
    return columns, said | ({"worker": last_workers(table["stays"])} if stays else {})


def leaves(file: Any) -> list[str]:
    """The paths of what is read of a file's columns of lists."""
    paths = [file.schema.column(place).path for place in range(len(file.schema.names))]
    return [path for path in paths if path.split(".")[-1] in WITHIN.get(path.split(".")[0], ())]


def last_workers(column: Any) -> list[str | None]:
    """Who has generated the end of each sample."""
    counts, flat = lists(column)
    found: list[str | None] = [None] * len(counts)
    owners = np.repeat(np.arange(len(counts)), counts).tolist()
    for owner, what, where in zip(owners, flat.field("what").to_pylist(), flat.field("where").to_pylist(), strict=True):
        if what == "generate":
            found[owner] = where
    return found


def lists(column: Any) -> tuple[np.ndarray, Any]:
    """How long each list of a column is, int64, and all their elements one behind the other."""
    import pyarrow as arrow

    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, arrow.ChunkedArray) else array
    return array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), array.flatten()


def is_further(field: Any) -> bool:
    """Whether a column has one number a sample that is neither known nor a time."""
    import pyarrow.types as types

    of_numbers = types.is_integer(field.type) or types.is_floating(field.type) or types.is_boolean(field.type)
    return of_numbers and field.name not in (*KNOWN, *WORDS, *PLAIN) and not field.name.endswith("_at")


def numbers(table: Any, name: str, kind: Any) -> np.ndarray:
    column = table[name].cast("float64" if np.dtype(kind).kind == "f" else "int64")
    if column.null_count:
        column = column.fill_null(np.nan if np.dtype(kind).kind == "f" else 0)
    return column.to_numpy().astype(kind)


def of_segments(column: Any, step: int) -> dict[str, np.ndarray]:
    """What each sample's segments say: `tokens`, `versions`, `oldest`, `newest`, `staleness`."""
    counts, flat = lists(column)
    starts, ends, steps = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end", "step"))
    tokens, versions = np.zeros(len(counts), np.int32), np.zeros(len(counts), np.int16)
    oldest = newest = np.full(len(counts), step - 1, np.int32)
    if len(steps):
        some = counts > 0
        begins = (np.cumsum(counts) - counts)[some]
        tokens[some] = np.add.reduceat(ends - starts, begins)
        changes = np.concatenate([[True], steps[1:] != steps[:-1]])
        changes[begins] = True
        versions[some] = np.add.reduceat(changes.astype(np.int16), begins)
        oldest, newest = oldest.copy(), newest.copy()
        oldest[some] = np.minimum.reduceat(steps, begins)
        newest[some] = np.maximum.reduceat(steps, begins)
    staleness = np.where(counts > 0, step - 1 - oldest, 0).astype(np.int16)
    return {"tokens": tokens, "versions": versions, "oldest": oldest, "newest": newest, "staleness": staleness}


def digests_of(column: Any) -> np.ndarray:
    """uint64: a digest of each text."""
    import pyarrow as arrow

    encoded = column.cast(arrow.binary()).combine_chunks().dictionary_encode()
    encoded = encoded.chunk(0) if isinstance(encoded, arrow.ChunkedArray) else encoded
    digests = [blake2b(text, digest_size=8).digest() for text in encoded.dictionary.to_pylist()]
    of_texts = np.frombuffer(b"".join(digests), np.uint64)
    return of_texts[encoded.indices.to_numpy(zero_copy_only=False)] if len(of_texts) else of_texts
