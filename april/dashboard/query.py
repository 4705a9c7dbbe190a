"""Which samples are asked for: filters over the index, a sorting, and a text that is looked for in the files."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from april.config import ConfigError
from april.dashboard.index import GONE, SampleIndex
from april.dashboard.one import opened

PAGE = 50
"""rows that are sent at once"""
BLOCK = 1 << 16
"""rows that are sorted at once"""
SEARCH_HITS = 200
SEARCH_S = 20.0
"""after which a search says how far it has come, and is gone on with when it is asked to be"""
RANGES = ("min", "max")


@dataclass(frozen=True)
class Query:
    """Of an address: `?reward.min=0.5&finish_reason=length&sort=-tokens&text=apple`."""

    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """by column, both ends included"""
    words: dict[str, str] = field(default_factory=dict)
    prompt: int | None = None
    sort: str = "-step"
    """a column; with a minus the largest first"""
    offset: int = 0
    text: str = ""
    before: int | None = None
    """look for the text in steps before this one"""

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> "Query":
        """Raises ConfigError."""
        ranges: dict[str, tuple[float, float]] = {}
        words = {}
        for key, value in asked.items():
            name, _, end = key.rpartition(".")
            if end in RANGES and value:
                low, high = ranges.get(name, (-np.inf, np.inf))
                ranges[name] = (number(key, value), high) if end == "min" else (low, number(key, value))
            elif key.startswith("is."):
                words[key.removeprefix("is.")] = value
        return cls(
            ranges,
            words,
            digest(asked["prompt"]) if asked.get("prompt") else None,
            asked.get("sort") or "-step",
            max(0, int(number("offset", asked.get("offset") or "0"))),
            asked.get("text") or "",
            int(number("before", asked["before"])) if asked.get("before") else None,
        )


def number(key: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = np.nan
    if not np.isfinite(found):
        raise ConfigError(f"filter {key!r} = {value!r} is no number; give one such as 0.5")
    return found


def digest(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise ConfigError(f"filter 'prompt' = {text!r} is none of a prompt; take it from a sample's link") from None


def matching(index: SampleIndex, query: Query) -> np.ndarray:
    """Numbers of the rows that the filters let through, the text aside. Raises ConfigError for a column that is not
    there."""
    with index.lock:
        kept = index.column("step") != GONE
        for name, (low, high) in query.ranges.items():
            column = column_of(index, name)
            if low != -np.inf:
                kept &= column >= low
            if high != np.inf:
                kept &= column <= high
        for name, word in query.words.items():
            if name in index.columns:
                known = index.words[name]
                kept &= index.column(name) == (known.index(word) if word in known else -1)
            elif word:
                kept &= False
        if query.prompt is not None:
            kept &= index.column("prompt") == np.uint64(query.prompt)
        return true_places(kept)


def true_places(kept: np.ndarray) -> np.ndarray:
    """int32: where it is true."""
    found = [np.flatnonzero(kept[at : at + BLOCK]).astype(np.int32) + np.int32(at) for at in range(0, len(kept), BLOCK)]
    return np.concatenate(found) if found else np.empty(0, np.int32)


def page(index: SampleIndex, rows: np.ndarray, query: Query) -> list[dict[str, Any]]:
    """PAGE of the rows from the offset on, in the order that is asked for; of equals the newest first, by group."""
    with index.lock:
        name = query.sort.removeprefix("-")
        keys = [(column_of(index, name), query.sort.startswith("-")), (index.column("step"), True)]
        keys += [(index.column("group"), False), (index.column("index"), False)]
        ordered = first(rows, keys, query.offset + PAGE)
        return [index.row(number) for number in ordered[query.offset :].tolist()]


def first(rows: np.ndarray, keys: list[tuple[np.ndarray, bool]], count: int) -> np.ndarray:
    """So many of the rows in order of the keys, each a column and whether its largest come first; a block of rows at a
    time, so that no column is copied whole."""
    front, block = rows[:0], max(BLOCK, count)
    for at in range(0, len(rows), block):
        front = front_of(np.concatenate([front, rows[at : at + block]]), keys, count)
    return front


def front_of(rows: np.ndarray, keys: list[tuple[np.ndarray, bool]], count: int) -> np.ndarray:
    """The same of all the rows at once: only what is close to the front is sorted."""
    chosen, rest, missing = [], rows, count
    for column, falling in keys:
        if len(rest) <= missing:
            break
        values = rising(column[rest], falling)
        values.partition(missing - 1)
        edge = values[missing - 1]
        values = rising(column[rest], falling)
        chosen.append(rest[values < edge])
        missing -= len(chosen[-1])
        rest = rest[values == edge]
    front = np.concatenate([*chosen, rest[:missing]])
    return front[np.lexsort([rising(column[front], falling) for column, falling in reversed(keys)])]


def rising(values: np.ndarray, falling: bool) -> np.ndarray:
    """Of a copy, which may be changed: smallest first; what is not a number comes last."""
    values = values.astype(np.float64, copy=False)
    if falling:
        np.negative(values, out=values)
    values[np.isnan(values)] = np.inf
    return values


def column_of(index: SampleIndex, name: str) -> np.ndarray:
    if name not in index.columns:
        raise ConfigError(f"column {name!r} is none of the samples'; use one of {', '.join(index.columns)}")
    return index.column(name)


def search(index: SampleIndex, query: Query) -> Iterator[dict[str, Any]]:
    """Samples with the text in prompt or response, whatever its case, newest step first: {"row": …} as each is found,
    {"searched": step} now and then, and last {"done": whether all was looked at, "before": step to go on from}."""
    rows = matching(index, query)
    deadline, hits, looked_at = time.monotonic() + SEARCH_S, 0, 0
    for step, begin, end in index.spans():
        inside = rows[slice(*np.searchsorted(rows, (begin, end)))]
        if not len(inside) or (query.before is not None and step >= query.before):
            continue
        for number in having(index.run_dir, step, inside - begin, query.text):
            hits += 1
            with index.lock:
                found = index.row(int(inside[number]))
            yield {"row": found}
        looked_at += 1
        if looked_at % 50 == 0:
            yield {"searched": step}
        if hits >= SEARCH_HITS or time.monotonic() > deadline:
            yield {"done": False, "before": step}
            return
    yield {"done": True, "before": None}


def having(run_dir: Path, step: int, places: np.ndarray, text: str) -> list[int]:
    """Which of a file's rows at these places, in rising order, have the text; none of a file that is gone."""
    import pyarrow as arrow
    import pyarrow.compute as compute

    try:
        with opened(run_dir, step) as file:
            table = file.read(["prompt", "response"], use_threads=False)
    except (OSError, arrow.ArrowInvalid):
        return []
    hits = np.zeros(len(table), bool)
    for name in ("prompt", "response"):
        found = compute.match_substring(table[name], text, ignore_case=True)
        hits |= found.fill_null(False).to_numpy()
    return np.flatnonzero(hits[places[places < len(hits)]]).tolist()
