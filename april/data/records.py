"""Reads the records of dataset files: JSON lines, JSON, Parquet, Arrow, and folders of them.

A folder is one written by `datasets.Dataset.save_to_disk` (its `state.json` lists Arrow files), or holds data files of
one kind, which are read in the order of their names. At most one batch of records is in memory. A file whose content
does not match its extension is refused. JSON numbers keep their digits, and objects with duplicate keys are bad rows.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from april.config import ConfigError, SourceSection
from april.config.hub import choose_files, chosen, names_in, read_card
from april.data.rows import BadRow, excerpt
from april.util.errors import refuse

# --- JSON -------------------------------------------------------------------------------------------------------------

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LiteralNumber(float):
    """A float that prints as it is written in the file, such as 1.10."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def parse_json(text: bytes) -> Any:
    """Parse a JSON text. A record that contains an object with a duplicate key is returned as a BadRow.

    Raises BadRow for text that is not JSON by RFC 8259.
    """
    try:
        orjson.loads(text)  # refuses what the next line takes: NaN, half a surrogate pair, text that is not UTF-8
        return json.loads(text, parse_float=LiteralNumber, object_pairs_hook=checked_object)
    except orjson.JSONDecodeError as error:
        raise BadRow(f"{excerpt(text)} is not JSON ({error}); {fix_for(text, error)}") from None
    except RecursionError:
        raise BadRow(f"{excerpt(text)} is nested too deeply; write an object with prompt and label") from None


def checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRow:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        return BadRow(f"key {duplicate!r} occurs twice; leave one of them out")
    for value in record.values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, BadRow):
                return part
    return record


def fix_for(text: bytes, error: orjson.JSONDecodeError) -> str:
    if "infinity" in str(error):
        return "write a number that large as text, in quotes"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "write it as UTF-8"
    return "write one JSON object on each line"


# --- files ------------------------------------------------------------------------------------------------------------

BATCH_ROWS = 256
"""Records of a columnar file converted to Python objects at a time."""
JSON_LINES, JSON, PARQUET, ARROW = (".jsonl", ".ndjson"), (".json",), (".parquet",), (".arrow",)
KINDS = (JSON_LINES, JSON, PARQUET, ARROW)
SPLITS = ("train", "test", "validation", "val", "valid", "dev", "eval", "heldout")
"""File names, extension left out, that denote a split in a dataset whose files have no shard numbers."""
SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d+)-of-(?P<total>\d+)(-\w+)?")
HUB_FILES = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
"""Metadata files in folders of the `datasets` library."""
ARROW_FILE_MAGIC, PARQUET_MAGIC = b"ARROW1", b"PAR1"
NOT_TEXT = {
    b"\x1f\x8b": ("compressed by gzip", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it"),
    b"BZh": ("compressed by bzip2", "unpack it"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    PARQUET_MAGIC: ("Parquet", "give it the ending .parquet"),
    ARROW_FILE_MAGIC: ("Arrow", "give it the ending .arrow"),
    b"\xff\xfe": ("UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "save it as UTF-8"),
    b"version https://git-lfs": ("a pointer of Git LFS", "fetch what it points at with `git lfs pull`"),
}
"""First bytes of a file that should be JSON and is not -> (the file's actual format, the fix)."""

Record = tuple[str, Any]
"""(location such as "FILE, line 3", the record there or the BadRow that says why it is unreadable)."""


def read_records(files: Iterable[Path], columns: set[str]) -> Iterator[Record]:
    """All records of files. `columns`: names of the needed fields; a record may lack its other fields.

    Raises ConfigError for a file that cannot be read.
    """
    for file in files:
        try:
            yield from read_file(file, columns)
        except OSError as error:
            raise unreadable(file, error) from None


def data_files(source: SourceSection) -> list[Path]:
    """The files of a source, in reading order: of its split and configuration, if it names them. Raises ConfigError for
    a folder that is not one dataset."""
    path, split = source.path, source.split
    if not (split or source.configuration):
        return files_at(path)
    if split and (path / "dataset_dict.json").is_file():
        saved = [folder.name for folder in path.iterdir() if (folder / "state.json").is_file()]
        return files_at(path / chosen("data.split", split, saved, ()))
    if not path.is_dir():
        refuse("data.split", split or source.configuration, f"is of a dataset, and {path} is no folder", "leave it out")
    card, asked = read_card(path), (source.configuration, split)
    _, _, names = choose_files(names_in(path), card, *asked, "data.{}".format)
    return checked(path, [path / name for name in names])


def files_at(path: Path) -> list[Path]:
    """The file at a path, or the files in a folder that is one dataset. Raises ConfigError for another folder."""
    if not path.is_dir():
        return [path]
    if (path / "state.json").is_file():
        try:
            return [path / file["filename"] for file in orjson.loads((path / "state.json").read_bytes())["_data_files"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(
                f"dataset {path} has a state.json without its list of files; save it with save_to_disk again"
            ) from None
    if (path / "dataset_dict.json").is_file():
        folders = ", ".join(sorted(str(folder) for folder in path.iterdir() if (folder / "state.json").is_file()))
        raise ConfigError(f"dataset {path} has several splits; give one of them: {folders}; or data.split")
    files = sorted(file for file in path.iterdir() if kind_of(file) and file.name not in HUB_FILES)
    if not files:
        raise ConfigError(f"dataset {path} is a folder without JSONL, JSON, Parquet or Arrow files; give one with some")
    return checked(path, files, sorted({split_of(file) for file in files}))


def checked(path: Path, files: list[Path], splits: Sequence[str] = ()) -> list[Path]:
    """Check that `files`, those of the dataset in the folder `path`, are of one kind and of one split, with all shards,
    and return them. `splits`: the splits that their names denote. Raises ConfigError."""
    if len({kind_of(file) for file in files}) > 1:
        raise ConfigError(f"dataset {path} is a folder with files of several kinds; give one of them")
    if len(splits) > 1:
        raise ConfigError(
            f"dataset {path} is a folder with files of {', '.join(splits)}; say which with data.split, or put those to "
            "read in their own"
        )
    check_shards(path, files)
    return files


def check_shards(path: Path, files: list[Path]) -> None:
    """Raises ConfigError if shards of a dataset are missing, or the names of `files` disagree on the number of shards.
    `path`: the dataset's folder, for the error."""
    shards = [found for file in files if (found := SHARD.fullmatch(file.stem))]
    totals = {int(shard["total"]) for shard in shards}
    if len(totals) > 1:
        raise ConfigError(f"dataset {path} has shards of {' and of '.join(map(str, sorted(totals)))}; keep one set")
    missing = sorted(set(range(max(totals, default=0))) - {int(shard["number"]) for shard in shards})
    if missing:
        raise ConfigError(
            f"dataset {path} lacks {len(missing)} of {max(totals)} shards, the first number {missing[0]:05d}; "
            "fetch the rest, or name the files to read one by one in data.sources"
        )


def kind_of(file: Path) -> tuple[str, ...] | None:
    return next((kind for kind in KINDS if file.suffix in kind), None)


def split_of(file: Path) -> str:
    """Split that a file name denotes: `train` for `train-00000-of-00002.parquet` and for `train.jsonl`.

    All names that denote no split count as one split, "other files".
    """
    shard = SHARD.fullmatch(file.stem)
    return shard["split"] if shard else file.stem if file.stem in SPLITS else "other files"


def read_file(file: Path, columns: set[str]) -> Iterator[Record]:
    kind = kind_of(file)
    if kind is PARQUET:
        return read_parquet(file, columns)
    if kind is ARROW:
        return read_arrow(file, columns)
    beginning = text_beginning(file)
    if kind is JSON and beginning.lstrip()[:1] == b"[":
        return read_array(file)
    return read_lines(file)


def text_beginning(file: Path) -> bytes:
    """The first bytes of a file, without a byte-order mark. Raises ConfigError for a binary file."""
    with file.open("rb") as content:
        beginning = content.read(64)
    for magic, (what, mend) in NOT_TEXT.items():
        if beginning.startswith(magic):
            raise ConfigError(f"dataset {file} is {what}, and JSON was expected by its name; {mend}")
    return beginning.removeprefix(BYTE_ORDER_MARK)


def read_lines(file: Path) -> Iterator[Record]:
    """One record per line; blank lines are skipped."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if text.strip():
                yield f"{file}, line {number}", parsed_line(text)


def parsed_line(line: bytes) -> Any:
    try:
        return parse_json(line)
    except BadRow as error:
        return error


def read_array(file: Path) -> Iterator[Record]:
    """Records of a JSON file that holds one array; the file is read whole."""
    try:
        records = parse_json(file.read_bytes().removeprefix(BYTE_ORDER_MARK))
    except BadRow as error:
        raise ConfigError(f"dataset {file}: {error}") from None
    for number, record in enumerate(records, start=1):
        yield f"{file}, row {number}", record


def read_parquet(file: Path, columns: set[str]) -> Iterator[Record]:
    parquet = import_arrow(file, "pyarrow.parquet")
    with refusing_damage(file, "Parquet"), parquet.ParquetFile(file) as content:
        wanted = present(content.schema_arrow.names, columns)
        yield from numbered(file, "Parquet", content.iter_batches(BATCH_ROWS, columns=wanted))


def read_arrow(file: Path, columns: set[str]) -> Iterator[Record]:
    """Records of a file in either Arrow format: the stream format, which `save_to_disk` writes, or the file format.
    `columns`: names of the needed fields."""
    arrow = import_arrow(file, "pyarrow")
    with refusing_damage(file, "Arrow"), arrow.memory_map(str(file)) as content:
        magic = content.read(len(ARROW_FILE_MAGIC))
        content.seek(0)
        if magic == ARROW_FILE_MAGIC:
            reader = arrow.ipc.open_file(content)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            reader = batches = arrow.ipc.open_stream(content)
        wanted = present(reader.schema.names, columns)
        yield from numbered(file, "Arrow", (part for batch in batches for part in slices(batch.select(wanted))))


def present(names: list[str], columns: set[str]) -> list[str]:
    """The columns to read, of the `names` in a file: the needed `columns`, or all of `names` if the prompt or the label
    seems to be missing, so that the error can list what there is."""
    found = [name for name in names if name in columns]
    return found if len(set(found) - {"reward", "images", "image"}) >= 2 else names


def slices(batch) -> Iterator[Any]:
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


def numbered(file: Path, format_name: str, batches: Iterable[Any]) -> Iterator[Record]:
    """The records of all batches, each with its location, such as "FILE, row 3". `format_name`: the file's format, for
    errors."""
    number, remaining = 0, iter(batches)
    while True:
        with refusing_damage(file, format_name, number + 1):
            batch = next(remaining, None)
            records = [] if batch is None else records_of(batch)
        if batch is None:
            return
        for record in records:
            number += 1
            yield f"{file}, row {number}", record


def records_of(batch) -> list[Any]:
    """Records of an Arrow batch, converted one by one if some text is not UTF-8, so that only that row is bad."""
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError:
        records = [record_of(batch.slice(row, 1)) for row in range(batch.num_rows)]
    for name in (field.name for field in batch.schema if str(field.type) == "float"):
        for record in records:
            if isinstance(record, dict) and record[name] is not None:
                record[name] = float(str(np.float32(record[name])))
    return records


def record_of(row) -> Any:
    record = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            record[name] = column[0].as_py()
        except UnicodeDecodeError as error:
            return BadRow(f"key {name!r} is not UTF-8 ({error.reason} at byte {error.start}); write its text as UTF-8")
    return record


@contextlib.contextmanager
def refusing_damage(file: Path, format_name: str, row: int = 0) -> Iterator[None]:
    """Context manager that turns pyarrow's errors into ConfigError.

    `format_name`: the file's format, for the error text; `row`: number of the first row not yet read, for the same; 0
    while the file's header is read.
    """
    damage = import_arrow(file, "pyarrow").ArrowException
    try:
        yield
    except (damage, OSError, UnicodeDecodeError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        where = f" from row {row} on" if row else ""
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"dataset {file} cannot be read as {format_name}{where} ({text}); copy or save the file again"
        ) from None


def import_arrow(file: Path, module: str):
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"dataset {file} needs pyarrow, which is not installed; `pip install 'april-rl[data]'`, or give JSON lines"
        ) from None


def unreadable(path: Path, error: Exception) -> ConfigError:
    text = str(error).partition("\n")[0]
    return ConfigError(f"dataset {path} cannot be read ({text}); give readable JSON lines, JSON, Parquet or Arrow")
