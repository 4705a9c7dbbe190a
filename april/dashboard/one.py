"""Samples read whole, by their place in a file: a row group at a time, whatever columns it has."""

import math
from pathlib import Path
from typing import Any

from april.config import ConfigError
from april.dashboard.pieces import Pieces

EXCERPT_CHARACTERS = 160
"""of a text in a table"""
HEAVY = ("prompt_ids", "response_ids", "behaviour_logprobs", "learner_logprobs", "entropies", "chunks")
"""columns with a value a token or a chunk"""


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "samples" / f"step_{step:06d}.parquet"


def opened(run_dir: Path, step: int):
    """The step's file, to be closed. Raises OSError."""
    import pyarrow.parquet as parquet

    return parquet.ParquetFile(path_of(run_dir, step))


def read_places(run_dir: Path, step: int, places: list[int], columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Rows of a step's file, of all columns or those named. Raises ConfigError."""
    import pyarrow as arrow

    try:
        with opened(run_dir, step) as file:
            rows: dict[int, dict[str, Any]] = {}
            begin = 0
            for number in range(file.num_row_groups):
                end = begin + file.metadata.row_group(number).num_rows
                inside = [place for place in places if begin <= place < end]
                if inside:
                    table = file.read_row_group(number, columns=columns, use_threads=False)
                    picked = table.take([place - begin for place in inside])
                    rows.update(zip(inside, to_rows(picked), strict=True))
                begin = end
    except (OSError, arrow.ArrowInvalid) as error:
        reason = "is not kept" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ConfigError(f"the file of step {step} {reason}; look for another step's") from None
    return [rows[place] for place in places if place in rows]


def to_rows(table: Any) -> list[dict[str, Any]]:
    """Dictionaries, in which text that is not UTF-8 shows where it is not, and what is no finite number is None."""
    import pyarrow as arrow

    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table[name]
        if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
            texts = column.cast(arrow.binary()).to_pylist()
            columns[name] = [None if text is None else text.decode(errors="replace") for text in texts]
        else:
            columns[name] = [finite(value) for value in column.to_pylist()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite(one) for one in value]
    return value


def places_of(
    run_dir: Path, step: int, group: int, index: int | None = None, branch: int = 0, discarded: str = ""
) -> list[int]:
    """Of a group's samples in the step's file, or of one of them, by their index; `branch` of that, where it is the
    session of an agent, and first what was `discarded` of it for that reason. Raises ConfigError."""
    import pyarrow as arrow

    try:
        with opened(run_dir, step) as file:
            columns = [name for name in ("group", "index", "branch", "discarded") if name in file.schema_arrow.names]
            table = file.read(columns, use_threads=False)
    except (OSError, arrow.ArrowInvalid):
        raise ConfigError(f"samples of step {step} are not kept, or cannot be read; look for another step's") from None
    branches = table["branch"].to_pylist() if "branch" in columns else [0] * len(table)
    reasons = table["discarded"].to_pylist() if "discarded" in columns else [""] * len(table)
    rows = list(zip(table["group"].to_pylist(), table["index"].to_pylist(), branches, strict=True))
    found = [
        (*row, (reasons[place] or "") != discarded, place)
        for place, row in enumerate(rows)
        if row == (group, index, branch) or (index is None and row[0] == group)
    ]
    if not found:
        name = f"group {group}" if index is None else f"sample {group}.{index}"
        raise ConfigError(f"{name} is not among those that are kept of step {step}; look in the table of samples")
    return [place for *_, place in sorted(found)]


def excerpts(run_dir: Path, wanted: list[tuple[int, int]]) -> list[dict[str, str] | None]:
    """Of samples by (step, place): the end of the prompt and the beginning of the response; None of what is gone."""
    by_step: dict[int, list[int]] = {}
    for step, place in wanted:
        by_step.setdefault(step, []).append(place)
    found: dict[tuple[int, int], dict[str, str]] = {}
    for step, places in by_step.items():
        try:
            rows = read_places(run_dir, step, places, ["prompt", "response"])
        except ConfigError:
            continue
        for place, row in zip(places, rows, strict=False):
            prompt, response = row["prompt"] or "", row["response"] or ""
            found[step, place] = {
                "prompt": prompt[-EXCERPT_CHARACTERS:],
                "response": response[:EXCERPT_CHARACTERS],
            }
    return [found.get(key) for key in wanted]


def group_of(run_dir: Path, step: int, group: int) -> list[dict[str, Any]]:
    """A group's samples without their columns of tokens, each with how many `tokens` its response has."""
    with opened_or_refused(run_dir, step) as file:
        columns = [name for name in file.schema_arrow.names if name not in HEAVY]
    rows = read_places(run_dir, step, places_of(run_dir, step, group), columns)
    return [row | {"tokens": sampled(row)} for row in rows]


def opened_or_refused(run_dir: Path, step: int):
    try:
        return opened(run_dir, step)
    except (OSError, ValueError):
        raise ConfigError(f"samples of step {step} are not kept, or cannot be read; look for another step's") from None


def sampled(row: dict[str, Any]) -> int:
    return sum(segment["end"] - segment["start"] for segment in row["segments"] or [])


def whole(run_dir: Path, step: int, place: int, model: Path, pieces: Pieces) -> dict[str, Any]:
    """All that is kept of a sample, the `pieces` of its response, and its `turns`."""
    (row,) = read_places(run_dir, step, [place])
    ids = row["response_ids"] or []
    return row | {
        "pieces": pieces.of(model, ids),
        "turns": row.get("turns") or turns(row, len(ids)),
        "tokens": sampled(row),
    }


def turns(row: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """Who speaks from where to where, in tokens of the response, of a file that does not say: `policy` or `other`."""
    spoken: list[dict[str, Any]] = []
    at = 0
    for segment in row["segments"] or []:
        if segment["start"] > at:
            spoken.append({"who": "other", "start": at, "end": segment["start"]})
        if spoken and spoken[-1]["who"] == "policy":
            spoken[-1]["end"] = segment["end"]
        else:
            spoken.append({"who": "policy", "start": segment["start"], "end": segment["end"]})
        at = segment["end"]
    return spoken + ([{"who": "other", "start": at, "end": length}] if at < length else [])
