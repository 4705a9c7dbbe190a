"""Records as they lie on disk, one after the other: JSON lines, JSON, Parquet, Arrow, and folders of them.

A folder is that of `datasets.Dataset.save_to_disk` (its `state.json` lists Arrow files), or holds data files of one
kind, which are read in the order of their names. Reading never holds more than one batch of records.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from april.config import ConfigError
from april.data.rows import BadRow, excerpt

BATCH_ROWS = 256
"""records of a columnar file that are Python objects at a time"""
JSON_LINES, JSON, PARQUET, ARROW = (".jsonl", ".ndjson"), (".json",), (".parquet",), (".arrow",)
KINDS = (JSON_LINES, JSON, PARQUET, ARROW)
SPLITS = ("train", "test", "validation", "val", "valid", "dev", "eval", "heldout")
"""names of files that are a split of their own, without a shard's number"""
HUB_FILES = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
"""what lies beside the data in folders of the `datasets` library"""
ARROW_FILE_MAGIC = b"ARROW1"

Record = tuple[str, Any]
"""where it is, and the record, or the BadRow that stands in its place"""


def read_records(path: Path, columns: set[str]) -> Iterator[Record]:
    """All records of a file or a folder. `columns`: the fields that are needed; others may be left out.

    Raises ConfigError for what cannot be read at all.
    """
    for file in data_files(path):
        try:
            yield from read_file(file, columns)
        except OSError as error:
            raise unreadable(path, error) from None


def data_files(path: Path) -> list[Path]:
    """The files of a dataset in the order in which they are read."""
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
        raise ConfigError(f"dataset {path} has several splits; give one of them: {folders}")
    files = sorted(file for file in path.iterdir() if kind_of(file) and file.name not in HUB_FILES)
    if not files:
        raise ConfigError(f"dataset {path} is a folder without JSONL, JSON, Parquet or Arrow files; give one with some")
    if len({kind_of(file) for file in files}) > 1:
        raise ConfigError(f"dataset {path} is a folder with files of several kinds; give one of them")
    splits = sorted({split_of(file) for file in files})
    if len(splits) > 1:
        raise ConfigError(
            f"dataset {path} is a folder with files of {', '.join(splits)}; put those to read in their own"
        )
    return files


def kind_of(file: Path) -> tuple[str, ...] | None:
    return next((kind for kind in KINDS if file.suffix in kind), None)


def split_of(file: Path) -> str:
    """`train` of `train-00000-of-00002.parquet` and of `train.jsonl`; other files without such a number are of one."""
    shard = re.fullmatch(r"(.+?)-\d+-of-\d+(-\w+)?", file.stem)
    return shard[1] if shard else file.stem if file.stem in SPLITS else "other files"


def read_file(file: Path, columns: set[str]) -> Iterator[Record]:
    kind = kind_of(file)
    if kind is PARQUET:
        return read_parquet(file, columns)
    if kind is ARROW:
        return read_arrow(file, columns)
    if kind is JSON and is_array(file):
        return read_array(file)
    return read_lines(file)


def read_lines(file: Path) -> Iterator[Record]:
    """One JSON object on each line; blank lines are no records."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}, line {number}", parse_line(line)


def parse_line(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return BadRow(f"{excerpt(line)} is not JSON ({error}); write one JSON object on each line")


def is_array(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(64).lstrip()[:1] == b"["


def read_array(file: Path) -> Iterator[Record]:
    """A JSON file that is one array of objects; such a file is read whole."""
    try:
        records = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"dataset {file} is not JSON ({error}); mend it, or give one JSON object on each line"
        ) from None
    for number, record in enumerate(records, start=1):
        yield f"{file}, row {number}", record


def read_parquet(file: Path, columns: set[str]) -> Iterator[Record]:
    parquet = import_arrow(file, "pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as content:
            wanted = present(content.schema_arrow.names, columns)
            yield from numbered(file, content.iter_batches(BATCH_ROWS, columns=wanted))
    except import_arrow(file, "pyarrow").ArrowInvalid as error:
        raise unreadable(file, error) from None


def read_arrow(file: Path, columns: set[str]) -> Iterator[Record]:
    """Both of Arrow's forms: the stream, which `save_to_disk` writes, and the file."""
    arrow = import_arrow(file, "pyarrow")
    try:
        with arrow.memory_map(str(file)) as content:
            magic = content.read(len(ARROW_FILE_MAGIC))
            content.seek(0)
            if magic == ARROW_FILE_MAGIC:
                reader = arrow.ipc.open_file(content)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                reader = batches = arrow.ipc.open_stream(content)
            wanted = present(reader.schema.names, columns)
            yield from numbered(file, (part for batch in batches for part in slices(batch.select(wanted))))
    except arrow.ArrowInvalid as error:
        raise unreadable(file, error) from None


def present(names: list[str], columns: set[str]) -> list[str]:
    """Of a file's columns those to read; all of them when prompt or label may be missing, so that a refusal can name
    them."""
    found = [name for name in names if name in columns]
    return found if len(set(found) - {"reward"}) >= 2 else names


def slices(batch) -> Iterator[Any]:
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


def numbered(file: Path, batches) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", record


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
