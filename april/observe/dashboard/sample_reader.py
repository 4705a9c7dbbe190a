"""Read single samples with all their columns, by position in a step's Parquet file, and the texts of their tokens."""

import re
import threading
from pathlib import Path
from typing import Any

from april.config import ConfigError
from april.observe.report.samples import to_rows

# --- token texts ------------------------------------------------------------------------------------------------------

TOKENIZER_FILE = "tokenizer.json"


class TokenTexts:
    """Decodes single tokens. Only the last tokenizer is kept, because large vocabularies take much memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._tokenizer = None

    def texts(self, folder: Path, ids: list[int]) -> list[str] | None:
        """The text of each of the token `ids`, "" where its character continues in the next token; None if `folder`,
        that of the model, has no readable tokenizer."""
        from tokenizers.decoders import DecodeStream

        with self._lock:
            if folder != self._folder:
                self._folder, self._tokenizer = folder, load_tokenizer(folder)
            if self._tokenizer is None:
                return None
            stream, texts = DecodeStream(skip_special_tokens=False), []
            for token in ids:
                try:
                    texts.append(stream.step(self._tokenizer, token) or "")
                except Exception:  # an id outside the vocabulary, or bytes that never form a character
                    stream = DecodeStream(skip_special_tokens=False)
                    texts.append("�")
            return texts


def load_tokenizer(folder: Path):
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # the Rust library raises plain Exception
        return None


# --- samples ----------------------------------------------------------------------------------------------------------

IMAGE_NAME = re.compile("[0-9a-f]{64}")
EXCERPT_CHARACTERS = 160
"""Maximum number of characters of a text in a table of samples."""
TOKEN_COLUMNS = ("prompt_ids", "response_ids", "behaviour_logprobs", "learner_logprobs", "entropies", "chunks")
"""Parquet columns with one value per token or chunk of a sample."""


def step_file(run_dir: Path, step: int) -> Path:
    return run_dir / "samples" / f"step_{step:06d}.parquet"


def image_file(run_dir: Path, name: str) -> Path | None:
    """Path of the image file whose `name` a sample of the run contains; None if the run has no such file."""
    file = run_dir / "samples" / "images" / f"{name}.png"
    return file if IMAGE_NAME.fullmatch(name) and file.is_file() else None


def open_file(run_dir: Path, step: int):
    """Open the Parquet file with the samples of a step; the caller closes it. Raises OSError."""
    import pyarrow.parquet as parquet

    return parquet.ParquetFile(step_file(run_dir, step))


def read_rows_at(
    run_dir: Path, step: int, positions: list[int], columns: list[str] | None = None
) -> list[dict[str, Any]]:
    """The rows of a step's file at the given positions, with the named `columns` (None: all). Raises ConfigError."""
    import pyarrow as arrow

    try:
        with open_file(run_dir, step) as file:
            rows: dict[int, dict[str, Any]] = {}
            first = 0
            for number in range(file.num_row_groups):
                end = first + file.metadata.row_group(number).num_rows
                in_row_group = [position for position in positions if first <= position < end]
                if in_row_group:
                    table = file.read_row_group(number, columns=columns, use_threads=False)
                    chosen = table.take([position - first for position in in_row_group])
                    rows.update(zip(in_row_group, to_rows(chosen), strict=True))
                first = end
    except (OSError, arrow.ArrowInvalid) as error:
        reason = "is not kept" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ConfigError(f"the file of step {step} {reason}; look for another step's") from None
    return [rows[position] for position in positions if position in rows]


def positions_of(
    run_dir: Path, step: int, group: int, index: int | None = None, fork: int = 0, discarded: str = ""
) -> list[int]:
    """Positions of a group's samples in the step's file, or of the one with `index` and `fork` (of an agent's session);
    rows that were `discarded` for that reason come first. Raises ConfigError."""
    import pyarrow as arrow

    try:
        with open_file(run_dir, step) as file:
            columns = [name for name in ("group", "index", "fork", "discarded") if name in file.schema_arrow.names]
            table = file.read(columns, use_threads=False)
    except (OSError, arrow.ArrowInvalid):
        raise ConfigError(f"samples of step {step} are not kept, or cannot be read; look for another step's") from None
    forks = table["fork"].to_pylist() if "fork" in columns else [0] * len(table)
    reasons = table["discarded"].to_pylist() if "discarded" in columns else [""] * len(table)
    rows = list(zip(table["group"].to_pylist(), table["index"].to_pylist(), forks, strict=True))
    found = [
        (*row, (reasons[position] or "") != discarded, position)
        for position, row in enumerate(rows)
        if row == (group, index, fork) or (index is None and row[0] == group)
    ]
    if not found:
        name = f"group {group}" if index is None else f"sample {group}.{index}"
        raise ConfigError(f"{name} is not among those that are kept of step {step}; look in the table of samples")
    return [position for *_, position in sorted(found)]


def excerpts(run_dir: Path, keys: list[tuple[int, int]]) -> list[dict[str, str] | None]:
    """End of the prompt, and beginning of the response and of the reference answer, of each sample in `keys`: (step,
    row position in the step's file). None for a row that is gone."""
    by_step: dict[int, list[int]] = {}
    for step, position in keys:
        by_step.setdefault(step, []).append(position)
    found: dict[tuple[int, int], dict[str, str]] = {}
    for step, positions in by_step.items():
        try:
            rows = read_rows_at(run_dir, step, positions, ["prompt", "response", "label"])
        except ConfigError:
            continue
        for position, row in zip(positions, rows, strict=False):
            prompt, response = row["prompt"] or "", row["response"] or ""
            found[step, position] = {
                "prompt": prompt[-EXCERPT_CHARACTERS:],
                "response": response[:EXCERPT_CHARACTERS],
                "label": (row.get("label") or "")[:EXCERPT_CHARACTERS],
            }
    return [found.get(key) for key in keys]


def read_group(run_dir: Path, step: int, group: int) -> list[dict[str, Any]]:
    """A group's samples without TOKEN_COLUMNS, each with its number of sampled `tokens`."""
    with open_or_refuse(run_dir, step) as file:
        columns = [name for name in file.schema_arrow.names if name not in TOKEN_COLUMNS]
    rows = read_rows_at(run_dir, step, positions_of(run_dir, step, group), columns)
    return [row | {"tokens": sampled_tokens(row)} for row in rows]


def open_or_refuse(run_dir: Path, step: int):
    try:
        return open_file(run_dir, step)
    except (OSError, ValueError):
        raise ConfigError(f"samples of step {step} are not kept, or cannot be read; look for another step's") from None


def sampled_tokens(row: dict[str, Any]) -> int:
    return sum(segment["end"] - segment["start"] for segment in row["segments"] or [])


def read_sample(run_dir: Path, step: int, position: int, model: Path, token_texts: TokenTexts) -> dict[str, Any]:
    """All columns of the sample at row `position` of a step's file; also `pieces`, the text of each response token,
    `turns`, the spans of the response by speaker, and `tokens`, the number of sampled tokens. `model`: folder with the
    tokenizer."""
    (row,) = read_rows_at(run_dir, step, [position])
    ids = row["response_ids"] or []
    return row | {
        "pieces": token_texts.texts(model, ids),
        "turns": row.get("turns") or turns_of(row, len(ids)),
        "tokens": sampled_tokens(row),
    }


def turns_of(row: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """Spans of the response by speaker, `policy` or `other`, derived from the `row`'s segments, for files without a
    turns column. `length`: tokens of the response."""
    spans: list[dict[str, Any]] = []
    offset = 0
    for segment in row["segments"] or []:
        if segment["start"] > offset:
            spans.append({"who": "other", "start": offset, "end": segment["start"]})
        if spans and spans[-1]["who"] == "policy":
            spans[-1]["end"] = segment["end"]
        else:
            spans.append({"who": "policy", "start": segment["start"], "end": segment["end"]})
        offset = segment["end"]
    return spans + ([{"who": "other", "start": offset, "end": length}] if offset < length else [])
