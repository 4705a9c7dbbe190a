"""The steps of a run as columns of numbers, followed while metrics.jsonl grows; what workers did is read again when it
is asked for."""

import math
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from april.formats.metrics import is_step
from april.report.run_folder import read_summary, records_from

LEFT_OUT = ("lanes", "alarms", "tokens_by_age", "trained_histogram", "created_histogram")
"""keys of a line that are no figures to draw"""
MOST_COLUMNS = 256
SHARE_OF_VERSION = "version_share_"
"""a column a version would be a column a step"""


class Steps:
    """`columns` hold a value a step, in order of the steps, NaN where a line has none.

    steps = Steps(run_dir)
    steps.follow()          # what has been written since; may be called from any thread
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / "metrics.jsonl"
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._offset = self._lines = 0
        self._begin()

    def __len__(self) -> int:
        return len(self._begins)

    def follow(self, budget_s: float = math.inf) -> bool:
        """Take in lines that are new, for so long; whether that was all of them. Raises ConfigError for a damaged
        file."""
        deadline = time.monotonic() + budget_s
        with self._following:
            if self.path.exists() and self.path.stat().st_size < self._offset:
                self._forget()
            for record, begin, end in records_from(self.path, self._offset, self._lines):
                with self._lock:
                    if is_step(record):
                        self._take(record, begin)
                    self._offset = end
                    self._lines += 1
                if time.monotonic() > deadline:
                    return False
            return True

    def _forget(self) -> None:
        """The file is another one."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self.alarms: dict[int, list[dict[str, str]]] = {}
        """by step, where there are some"""
        self._rows: dict[int, int] = {}
        """of the columns, by step"""
        self._begins: array[int] = array("q")
        """bytes at which the lines of the rows begin"""
        self._offset = self._lines = 0

    def _take(self, record: dict[str, Any], begin: int) -> None:
        step = record["step"]
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = len(self._begins)
            self._begins.append(begin)
            for column in self.columns.values():
                column.append(math.nan)
        self._begins[row] = begin
        for name, value in figures(record):
            if name not in self.columns:
                if len(self.columns) == MOST_COLUMNS:
                    continue
                self.columns[name] = array("d", [math.nan]) * len(self._begins)
            self.columns[name][row] = value
        self.alarms.pop(step, None)
        if raised := record.get("alarms"):
            self.alarms[step] = raised

    def table(self, names: list[str] | None = None, after: int = 0) -> dict[str, np.ndarray | None]:
        """Columns by name, all or those asked for, of the steps after one; NaN where a value is lacking."""
        with self._lock:
            rows = [row for step, row in sorted(self._rows.items()) if step > after]
            wanted = self.columns if names is None else {name: self.columns.get(name) for name in names}
            return {name: None if column is None else np.array(column)[rows] for name, column in wanted.items()}

    def between(self, begin_s: float, end_s: float, most: int) -> Iterator[dict[str, Any]]:
        """At most so many whole lines, evenly spread over those whose step ended in a time (Unix seconds), or was the
        first to end behind it."""
        with self._lock:
            times = self.columns.get("time", array("d"))
            ends = sorted((times[row], row) for row in self._rows.values() if times[row] >= begin_s)
            inside = [row for end, row in ends if end <= end_s]
            behind = [row for end, row in ends[len(inside) : len(inside) + 1]]
            rows = inside + behind
            spaced = [rows[place * len(rows) // most] for place in range(most)] if len(rows) > most else rows
            places = [self._begins[row] for row in spaced]
        if not places:
            return
        with self.path.open("rb") as file:
            for place in places:
                file.seek(place)
                yield orjson.loads(file.readline())


def figures(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """`learner.loss`: each number of a line with its name."""
    for key, value in tree.items():
        if key in LEFT_OUT or key.startswith(SHARE_OF_VERSION):
            continue
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, float(value)


def short(column: np.ndarray | None) -> np.ndarray | None:
    """With seven digits, where nothing in it needs more."""
    if column is None or (np.abs(column) >= 1e6).any():
        return column
    return column.astype(np.float32)


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Of the run's summary: `step`, `accuracy`, and of several sets that of each in `sets`, in order."""
    found = read_summary(run_dir / "summary.json").get("evaluation") or []
    points = [
        {
            "step": point.get("step") or 0,
            "accuracy": point["accuracy"],
            "sets": {name: of_set.get("accuracy") for name, of_set in (point.get("sets") or {}).items()},
        }
        for point in found
        if point.get("accuracy") is not None
    ]
    return sorted(points, key=lambda point: point["step"])
