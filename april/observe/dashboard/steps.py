"""The steps of a run as columns of numbers, followed while metrics.jsonl grows, and the comparison of two runs.

Worker events are read from the file on request.
"""

import logging
import math
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from april.config.stored import is_step
from april.observe.dashboard.index import GONE, SampleIndex
from april.observe.dashboard.sample_reader import excerpts
from april.observe.report.facts import SOURCE_REWARD
from april.observe.report.run_folder import records_from

log = logging.getLogger(__name__)

SKIPPED_KEYS = ("timeline", "alarms")
"""Keys of a step's record in metrics.jsonl that have no columns."""
HISTOGRAMS = ("trained_histogram", "created_histogram")
"""Keys of a step's record whose values are counts by histogram bin. Their columns are not listed as figures."""
OLDEST_AGE = 6
"""Last age, in policy steps, that is counted separately: tokens of this age and of all higher ages share one bin."""
MAX_COLUMNS = 256
"""Maximum number of columns of each kind: figures of the run, figures of its sources (data sets), and bins of
histograms."""
OF_SOURCE = "_source_"
"""Text that the name of a figure contains if the figure is about one source (data set) only."""
VERSION_SHARE = "version_share_"
"""Prefix of a record's keys that contain the name of a policy version. They get no columns: every step would add
one."""


class Steps:
    """Metrics of a run's steps as columns: `columns` hold one value per step, in file order, NaN where a record has
    none.

    steps = Steps(run_dir)
    steps.follow()          # read new lines; may be called from any thread
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / "metrics.jsonl"
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._offset = self._lines = 0
        self._clear()

    def __len__(self) -> int:
        return len(self._line_offsets)

    def follow(self, budget_s: float = math.inf) -> bool:
        """Read new lines for at most `budget_s`; returns whether all were read. Raises ConfigError for a damaged
        file."""
        deadline = time.monotonic() + budget_s
        with self._following:
            if self.path.exists() and self.path.stat().st_size < self._offset:
                self._restart()
            for record, line_offset, end in records_from(self.path, self._offset, self._lines):
                with self._lock:
                    if is_step(record):
                        self._add(record, line_offset)
                    self._offset = end
                    self._lines += 1
                if time.monotonic() > deadline:
                    return False
            return True

    def _restart(self) -> None:
        """Discard all columns and read from the beginning, because the file was replaced by a shorter one."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self.alarms: dict[int, list[dict[str, str]]] = {}
        """Alarms by step, for steps in which alarms were raised."""
        self._engine_gaps: dict[str, dict[str, Any]] = {}
        """By worker, the largest differences so far between the learner's and the engine's log-probabilities of tokens
        of age 0 (sampled with the learner's own weights)."""
        self._rows: dict[int, int] = {}
        """Index of each step's row in the columns, by step."""
        self._line_offsets: array[int] = array("q")
        """Byte offset in the file of each row's line."""
        self._offset = self._lines = 0
        self._rooms = {"bins": MAX_COLUMNS, "figures of sources": MAX_COLUMNS, "figures": MAX_COLUMNS}
        """Number of columns that may still be added, by kind of column (see MAX_COLUMNS); -1 once a column was left out
        because there were too many."""

    def _add(self, record: dict[str, Any], line_offset: int) -> None:
        step = record["step"]
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = len(self._line_offsets)
            self._line_offsets.append(line_offset)
            for column in self.columns.values():
                column.append(math.nan)
        self._line_offsets[row] = line_offset
        for name, value in figures(record):
            if name not in self.columns:
                kind = "bins" if is_bin(name) else "figures of sources" if OF_SOURCE in name else "figures"
                if self._rooms[kind] == 0:
                    log.warning(
                        "%s: %s and further %s have no columns: they are over %d", self.path, name, kind, MAX_COLUMNS
                    )
                if self._rooms[kind] >= 0:
                    self._rooms[kind] -= 1
                if self._rooms[kind] < 0:
                    continue
                self.columns[name] = array("d", [math.nan]) * len(self._line_offsets)
            self.columns[name][row] = value
        self.alarms.pop(step, None)
        if raised := record.get("alarms"):
            self.alarms[step] = raised
        for worker, gap in (record.get("engine_gaps") or {}).items():
            if gap["age"] == 0 and gap["mean"] is not None:
                worst = self._engine_gaps.setdefault(worker, gap)
                self._engine_gaps[worker] = gap | {key: max(gap[key], worst[key]) for key in ("mean", "largest")}

    @property
    def figure_names(self) -> list[str]:
        """Names of the columns that are figures, and not counts of a histogram's bins."""
        return [name for name in list(self.columns) if not is_bin(name)]

    def histogram(self, name: str) -> dict[int, float]:
        """Index of a bin -> its count, summed over all steps, for a histogram such as `lengths.trained_histogram`."""
        columns = self.table([column for column in list(self.columns) if column.startswith(f"{name}.")])
        counts: dict[int, float] = {}
        for column_name, column in columns.items():
            index = max(int(column_name.rpartition(".")[2]), 0)
            counts[index] = counts.get(index, 0.0) + (0.0 if column is None else float(np.nansum(column)))
        return counts

    def records(self) -> list[dict[str, Any]]:
        """One record for each step, with only those keys of metrics.jsonl that `describe` of the run page reads."""
        table = self.table(["step", "rollout_s", "gradient.tokens", "learner.train_s"])
        columns = [None if column is None else np.nan_to_num(column, nan=-1.0).tolist() for column in table.values()]
        missing = [-1.0] * len(columns[0] or [])
        records: list[dict[str, Any]] = [
            {
                "step": int(step),
                "rollout_s": max(0.0, rollout_s),
                "gradient": {"tokens": None if tokens < 0 else tokens},
                "learner": {"train_s": max(0.0, train_s)},
                "alarms": self.alarms.get(int(step)),
            }
            for step, rollout_s, tokens, train_s in zip(*(column or missing for column in columns), strict=True)
        ]
        rewards = [name for name in list(self.columns) if name.startswith(f"learner.{SOURCE_REWARD}")]
        for name, column in self.table(rewards).items():
            for record, value in zip(records, [] if column is None else column.tolist(), strict=False):
                record["learner"] |= {} if math.isnan(value) else {name.removeprefix("learner."): value}
        if records:
            records[-1]["engine_gaps"] = dict(self._engine_gaps)
        return records

    def table(self, names: list[str] | None = None, after: int = 0) -> dict[str, np.ndarray | None]:
        """All or the named columns, in order of the steps, for steps after `after`; None for an unknown column."""
        with self._lock:
            rows = [row for step, row in sorted(self._rows.items()) if step > after]
            columns = self.columns if names is None else {name: self.columns.get(name) for name in names}
            return {name: None if column is None else np.array(column)[rows] for name, column in columns.items()}

    def lines(self, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The complete records of these steps."""
        with self._lock:
            line_offsets = [self._line_offsets[self._rows[step]] for step in steps]
        yield from self._read(line_offsets)

    def between(self, begin_s: float, end_s: float, max_lines: int) -> Iterator[dict[str, Any]]:
        """At most `max_lines` complete records, evenly spread over the steps that ended between `begin_s` and `end_s`
        (Unix seconds) and the first step that ended after `end_s`."""
        with self._lock:
            times = self.columns.get("time", array("d"))
            ends = sorted((times[row], row) for row in self._rows.values() if times[row] >= begin_s)
            inside = [row for end, row in ends if end <= end_s]
            next_row = [row for end, row in ends[len(inside) : len(inside) + 1]]
            rows = inside + next_row
            sampled_rows = (
                [rows[index * len(rows) // max_lines] for index in range(max_lines)] if len(rows) > max_lines else rows
            )
            line_offsets = [self._line_offsets[row] for row in sampled_rows]
        yield from self._read(line_offsets)

    def _read(self, line_offsets: list[int]) -> Iterator[dict[str, Any]]:
        if not line_offsets:
            return
        with self.path.open("rb") as file:
            for line_offset in line_offsets:
                file.seek(line_offset)
                yield orjson.loads(file.readline())


def is_bin(name: str) -> bool:
    """Whether the column has the counts of one bin of a histogram."""
    return any(f".{key}." in name for key in HISTOGRAMS)


def figures(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, value) for each number in the nested record `tree`, with a dotted name such as `learner.loss`.
    `prefix`: beginning of the names, as in "learner." for an inner record."""
    for key, value in tree.items():
        if key in SKIPPED_KEYS or key.startswith(VERSION_SHARE):
            continue
        if key == "tokens_by_age" and value:
            value = limited_ages(value)
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, float(value)


def limited_ages(tokens_by_age: dict[str, int | None]) -> dict[str, int]:
    """`tokens_by_age`, tokens by age in policy steps, with the ages from OLDEST_AGE on counted together as OLDEST_AGE;
    None counts as 0."""
    limited: dict[str, int] = {}
    for age, tokens in tokens_by_age.items():
        key = str(min(int(age), OLDEST_AGE))
        limited[key] = limited.get(key, 0) + (tokens or 0)
    return limited


# --- comparison of two runs -------------------------------------------------------------------------------------------

MAX_PROMPTS = 50


def shared_prompts(index_a: SampleIndex, index_b: SampleIndex, offset: int = 0) -> dict[str, Any]:
    """Compare two runs on the prompts of which both have samples. For each prompt it compares one step of each run: the
    two steps that are nearest to each other, or the newest of several equally near pairs. Prompts are ordered by
    difference of mean reward, the largest first.

    `total`: number of such prompts; `page`: the maximum number in an answer; `prompts`: those from `offset` on, each
    with digest, end of the text, and for each run the step, the number of samples in it and their mean reward;
    `reading`: whether prompts may be missing because files are still being read.
    """
    reading = any(index.steps_read < index.steps_kept for index in (index_a, index_b))
    of_a, of_b = rewards_by_draw(index_a), rewards_by_draw(index_b)
    at_a, at_b = nearest_steps(of_a, of_b)
    difference = of_b.rewards[at_b] - of_a.rewards[at_a]
    order = np.argsort(-np.abs(difference), kind="stable")[offset : offset + MAX_PROMPTS]
    with index_a.lock:
        positions = [index_a.position(row) for row in of_a.first_rows[at_a[order]].tolist()]
    texts = excerpts(index_a.run_dir, positions)
    return {
        "total": len(at_a),
        "page": MAX_PROMPTS,
        "reading": reading,
        "prompts": [
            {
                "prompt": f"{int(of_a.prompts[a]):016x}",
                "text": text and text["prompt"],
                "steps": [int(of_a.steps[a]), int(of_b.steps[b])],
                "samples": [int(of_a.counts[a]), int(of_b.counts[b])],
                "reward": [float(of_a.rewards[a]), float(of_b.rewards[b])],
            }
            for a, b, text in zip(at_a[order].tolist(), at_b[order].tolist(), texts, strict=True)
        ],
    }


@dataclass(frozen=True)
class Draws:
    """Samples with a reward, grouped by prompt and step: one entry for each prompt in each step, sorted by prompt, then
    step."""

    prompts: np.ndarray
    """Digest of each entry's prompt, uint64."""
    steps: np.ndarray
    counts: np.ndarray
    rewards: np.ndarray
    """Mean reward of each entry's samples."""
    first_rows: np.ndarray
    """For each entry the row number, in the run's `SampleIndex`, of one of its samples."""


def rewards_by_draw(index: SampleIndex) -> Draws:
    with index.lock:
        rows = np.flatnonzero((index.column("step") != GONE) & np.isfinite(index.column("reward")))
        prompts, steps = index.column("prompt")[rows], index.column("step")[rows]
        rewards = index.column("reward")[rows]
    order = np.lexsort([steps, prompts])
    prompts, steps = prompts[order], steps[order]
    begins = np.flatnonzero(np.r_[True, (prompts[1:] != prompts[:-1]) | (steps[1:] != steps[:-1])][: len(rows)])
    counts = np.diff(np.r_[begins, len(rows)])
    sums = np.add.reduceat(rewards[order], begins) if len(begins) else np.zeros(0)
    return Draws(prompts[begins], steps[begins].astype(np.int64), counts, sums / counts, rows[order][begins])


def nearest_steps(of_a: Draws, of_b: Draws) -> tuple[np.ndarray, np.ndarray]:
    """(indices into `of_a`, indices into `of_b`): for each prompt that both have, the pair of entries whose steps are
    nearest to each other; of equally near pairs the newest."""
    shared = np.intersect1d(of_a.prompts, of_b.prompts)
    rows_a, rows_b = np.flatnonzero(np.isin(of_a.prompts, shared)), np.flatnonzero(np.isin(of_b.prompts, shared))
    numbers_a, numbers_b = (np.searchsorted(shared, d.prompts[r]) for d, r in ((of_a, rows_a), (of_b, rows_b)))
    steps_a, steps_b = of_a.steps[rows_a], of_b.steps[rows_b]
    # Entries of run B around each of A, in order of prompt and step; those of another prompt are infinitely far.
    later = np.searchsorted((numbers_b << 32) + steps_b, (numbers_a << 32) + steps_a)
    around = np.stack([later, later - 1])
    is_same = (around >= 0) & (around < len(rows_b))
    around = np.clip(around, 0, max(0, len(rows_b) - 1))
    is_same &= numbers_b[around] == numbers_a
    distances = np.where(is_same, np.abs(steps_b[around] - steps_a), np.inf)
    side = np.argmin(distances, axis=0)
    columns = np.arange(len(rows_a))
    nearest, distance = around[side, columns], distances[side, columns]
    order = np.lexsort([-steps_a, distance, numbers_a])
    _, firsts = np.unique(numbers_a[order], return_index=True)
    best = order[firsts]
    return rows_a[best], rows_b[nearest[best]]
