"""Queries over samples: filters and sorting on the index, and full-text search in the files."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from april.config import ConfigError
from april.observe.dashboard.index import GONE, SampleIndex
from april.observe.dashboard.sample_reader import open_file
from april.wire.limits import clip

PAGE = 50
"""Maximum number of rows in one page of results."""
BLOCK = 1 << 16
"""Number of rows that are sorted at once, which bounds memory."""
MAX_HITS = 200
SEARCH_S = 20.0
"""Time after which a text search stops and reports the step at which to continue, seconds."""
RANGES = ("min", "max")
MAX_INTEGER = 2**53
"""Maximum absolute value of a step, position or offset in a query; a browser's numbers are exact up to it."""
SHOWN = 40
"""Maximum number of characters of a refused value that an error text repeats."""


@dataclass(frozen=True)
class Query:
    """The query of a URL such as `?reward.min=0.5&is.finish_reason=length&sort=-tokens&text=apple`."""

    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Numeric filters: (lowest, highest) value by column, both included."""
    words: dict[str, str] = field(default_factory=dict)
    """Text filters: the required text by text column."""
    prompt: int | None = None
    """Digest of the prompt to which samples are restricted; None: all prompts."""
    sort: str = "-step"
    """Column by which rows are sorted; with a leading minus in descending order."""
    offset: int = 0
    text: str = ""
    before: int | None = None
    """Step before which the text is searched, to continue a search; None: all steps."""

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> "Query":
        """Parse the parameters of a URL. Raises ConfigError."""
        ranges: dict[str, tuple[float, float]] = {}
        words = {}
        for key, value in params.items():
            name, _, end = key.rpartition(".")
            if end in RANGES and value:
                low, high = ranges.get(name, (-np.inf, np.inf))
                ranges[name] = (number(key, value), high) if end == "min" else (low, number(key, value))
            elif key.startswith("is."):
                words[key.removeprefix("is.")] = value
        return cls(
            ranges,
            words,
            digest(params["prompt"]) if params.get("prompt") else None,
            params.get("sort") or "-step",
            max(0, integer("offset", params.get("offset") or "0")),
            params.get("text") or "",
            integer("before", params["before"]) if params.get("before") else None,
        )


def number(key: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = np.nan
    if not np.isfinite(found):
        raise ConfigError(f"filter {key!r} = {clip(value, SHOWN)!r} is no number; give one such as 0.5")
    return found


def integer(key: str, value: str) -> int:
    """Parse `value`, that of the query's parameter `key`, as a whole number from -MAX_INTEGER to MAX_INTEGER. Raises
    ConfigError, which names `key`."""
    found = number(key, value)
    if abs(found) > MAX_INTEGER:
        raise ConfigError(f"filter {key!r} = {clip(value, SHOWN)!r} is beyond {MAX_INTEGER}; give a smaller number")
    return int(found)


def digest(text: str) -> int:
    if not re.fullmatch("[0-9a-fA-F]{1,16}", text):
        fix = "take it from a sample's link"
        raise ConfigError(f"filter 'prompt' = {clip(text, SHOWN)!r} is none of a prompt; {fix}")
    return int(text, 16)


def matching_rows(index: SampleIndex, query: Query) -> np.ndarray:
    """Numbers, int32, of the index's rows that pass the query's filters, except for its text, which `search` looks for.
    Raises ConfigError for an unknown column."""
    with index.lock:
        mask = index.column("step") != GONE
        for name, (low, high) in query.ranges.items():
            column = column_of(index, name)
            if low != -np.inf:
                mask &= column >= low
            if high != np.inf:
                mask &= column <= high
        for name, word in query.words.items():
            if name in index.columns:
                known = index.texts_by_column[name]
                mask &= index.column(name) == (known.index(word) if word in known else -1)
            elif word:
                mask &= False
        if query.prompt is not None:
            mask &= index.column("prompt") == np.uint64(query.prompt)
        return true_indices(mask)


def true_indices(mask: np.ndarray) -> np.ndarray:
    """Positions of the true values, int32; computed block by block to save memory."""
    found = [
        np.flatnonzero(mask[start : start + BLOCK]).astype(np.int32) + np.int32(start)
        for start in range(0, len(mask), BLOCK)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int32)


def page(index: SampleIndex, rows: np.ndarray, query: Query) -> list[dict[str, Any]]:
    """One page of results: of the index's `rows` (their numbers), sorted as the query asks, at most PAGE from its
    offset on, as dictionaries. Equal rows are ordered by newest step, then group and index."""
    with index.lock:
        name = query.sort.removeprefix("-")
        keys = [(column_of(index, name), query.sort.startswith("-")), (index.column("step"), True)]
        keys += [(index.column("group"), False), (index.column("index"), False)]
        ordered = first_rows(rows, keys, query.offset + PAGE)
        return [index.row(number) for number in ordered[query.offset :].tolist()]


def first_rows(rows: np.ndarray, keys: list[tuple[np.ndarray, bool]], count: int) -> np.ndarray:
    """The first `count` of the `rows` (row numbers) in order of the `keys`, each of them (column, whether it is
    descending). Rows are processed in blocks, so that no column is copied as a whole."""
    front, block = rows[:0], max(BLOCK, count)
    for start in range(0, len(rows), block):
        front = select_front(np.concatenate([front, rows[start : start + block]]), keys, count)
    return front


def select_front(rows: np.ndarray, keys: list[tuple[np.ndarray, bool]], count: int) -> np.ndarray:
    """The first `count` of the `rows` (row numbers) in order of the `keys`, each of them (column, whether it is
    descending). All rows are processed at once, but only the first `count` are sorted (partial selection)."""
    chosen, rest, missing = [], rows, count
    for column, descending in keys:
        if len(rest) <= missing:
            break
        values = ascending_keys(column[rest], descending)
        values.partition(missing - 1)
        edge = values[missing - 1]
        values = ascending_keys(column[rest], descending)
        chosen.append(rest[values < edge])
        missing -= len(chosen[-1])
        rest = rest[values == edge]
    front = np.concatenate([*chosen, rest[:missing]])
    return front[np.lexsort([ascending_keys(column[front], descending) for column, descending in reversed(keys)])]


def ascending_keys(values: np.ndarray, descending: bool) -> np.ndarray:
    """Sort keys, float64, whose ascending order is that of `values`, or the reverse if `descending`; NaN comes last.
    May change `values`, which has to be a copy."""
    values = values.astype(np.float64, copy=False)
    if descending:
        np.negative(values, out=values)
    values[np.isnan(values)] = np.inf
    return values


def column_of(index: SampleIndex, name: str) -> np.ndarray:
    if name not in index.columns:
        raise ConfigError(f"column {name!r} is none of the samples'; use one of {', '.join(index.columns)}")
    return index.column(name)


def search(index: SampleIndex, query: Query) -> Iterator[dict[str, Any]]:
    """Search the text in prompts and responses, ignoring case, newest step first. Yields {"row": …} for each hit,
    {"searched": step} now and then, and at last {"done": whether all files were searched, "before": step to continue
    from}."""
    rows = matching_rows(index, query)
    deadline, hits, searched_files = time.monotonic() + SEARCH_S, 0, 0
    for step, begin, end in index.spans():
        file_rows = rows[slice(*np.searchsorted(rows, (begin, end)))]
        if not len(file_rows) or (query.before is not None and step >= query.before):
            continue
        for number in positions_with_text(index.run_dir, step, file_rows - begin, query.text):
            hits += 1
            with index.lock:
                found = index.row(int(file_rows[number]))
            yield {"row": found}
        searched_files += 1
        if searched_files % 50 == 0:
            yield {"searched": step}
        if hits >= MAX_HITS or time.monotonic() > deadline:
            yield {"done": False, "before": step}
            return
    yield {"done": True, "before": None}


def positions_with_text(run_dir: Path, step: int, positions: np.ndarray, text: str) -> list[int]:
    """Indices into `positions` (ascending rows of a step's file) of the rows with the text; [] if the file is gone."""
    import pyarrow as arrow
    import pyarrow.compute as compute

    try:
        with open_file(run_dir, step) as file:
            table = file.read(["prompt", "response"], use_threads=False)
    except (OSError, arrow.ArrowInvalid):
        return []
    hits = np.zeros(len(table), bool)
    for name in ("prompt", "response"):
        found = compute.match_substring(table[name], text, ignore_case=True)
        hits |= found.fill_null(False).to_numpy()
    return np.flatnonzero(hits[positions[positions < len(hits)]]).tolist()
