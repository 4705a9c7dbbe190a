"""Folders of policies that are made once: complete or absent, with a record of what they were made from."""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from april.config import ConfigError

RECORD = "warm_start.json"
"""Name of the JSON file in a finished policy folder with the recipe, the seed and the training time in seconds."""


def make_once(
    out_dir: Path, made_from: dict[str, Any], make: Callable[[Path], int], log: Callable[[str], None]
) -> Path:
    """Return the folder of a policy; if it does not exist, creates it with a record of what it was made from.
    `made_from`: recipe and seed, for the record; a folder with another record is made anew. `make` writes the policy to
    a folder, and returns its number of parameters. `out_dir` appears only once it is complete. Raises ConfigError if
    `out_dir` holds something else."""
    if holds(out_dir, made_from):
        return out_dir
    refuse_foreign(out_dir)
    started = time.monotonic()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        record = {**made_from, "parameters": make(draft), "seconds": round(time.monotonic() - started, 1)}
        (draft / RECORD).write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
        draft.chmod(0o755)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        draft.rename(out_dir)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    log(f"policy: {record['parameters']} parameters in {out_dir}, {record['seconds']:.0f} s")
    return out_dir


def holds(out_dir: Path, made_from: dict) -> bool:
    """Whether `out_dir` holds a finished policy whose record equals `made_from`, its recipe and seed."""
    record = out_dir / RECORD
    if not record.is_file():
        return False
    found = orjson.loads(record.read_bytes())
    return {key: found.get(key) for key in made_from} == made_from


def refuse_foreign(out_dir: Path) -> None:
    """Raises ConfigError unless `out_dir` is missing, empty, or the folder of a policy with the file `RECORD`."""
    if out_dir.exists() and not (out_dir / RECORD).is_file() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} holds something else than a quickstart policy; give an empty or a new folder")
