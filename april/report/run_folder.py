"""A run folder read back: configuration, trained steps and summary, also while the run is still going."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from april.config import ConfigError
from april.formats.versions import RUN_FOLDER


@dataclass(frozen=True)
class Run:
    """One run; every piece of `records` and `summary` may be absent or null."""

    path: Path
    config_text: str
    config: dict
    records: list[dict]
    """Lines of metrics.jsonl as they were written; a replayed step appears again."""
    summary: dict

    @property
    def name(self) -> str:
        return self.summary.get("run") or dig(self.config, "run", "name") or self.path.resolve().name

    @property
    def state(self) -> str:
        return self.summary.get("state") or "running"

    @property
    def steps(self) -> list[dict]:
        """One record a step, in order; of a replayed step the last."""
        by_step = {record["step"]: record for record in self.records}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def lanes(self) -> list[dict]:
        """What workers did and when, of all records, without entries that lack a worker or a time."""
        entries = [lane for record in self.records for lane in record.get("lanes") or []]
        return [lane for lane in entries if lane.get("worker") and lane.get("start") is not None]

    @property
    def pace(self) -> list[dict]:
        """How well each paced engine kept its pace, where there are some."""
        return [orjson.loads(path.read_bytes()) for path in sorted(self.path.glob("paced/*.json"))]

    @property
    def evaluation(self) -> list[dict]:
        """Held-out evaluations that have an accuracy, oldest first."""
        points = [point for point in self.summary.get("evaluation") or [] if point.get("accuracy") is not None]
        return sorted(points, key=lambda point: point.get("step") or 0)


def read_run(run_dir: str | Path) -> Run:
    """Read `runs/NAME`; a folder that is not a run's, or a damaged file, is a `ConfigError`."""
    path = Path(run_dir)
    if not path.is_dir():
        raise ConfigError(f"run folder {path} does not exist; give the folder of a run, such as runs/NAME")
    config_path = path / "config.toml"
    if not config_path.is_file():
        raise ConfigError(f"{path} is not a run folder: {config_path} does not exist; give a folder such as runs/NAME")
    RUN_FOLDER.check(path)
    config_text = config_path.read_text()
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{config_path} is not TOML: {error}; mend that line") from None
    return Run(path, config_text, config, read_records(path / "metrics.jsonl"), read_summary(path / "summary.json"))


def read_records(path: Path) -> list[dict]:
    """Complete lines of metrics.jsonl. A last line that was cut while being written is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = parse_json(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif any(later.strip() for later in lines[number:]):
            raise ConfigError(f"{path} line {number} is not a step's JSON object; remove that line")
    return records


def read_summary(path: Path) -> dict:
    if not path.exists():
        return {}
    summary = parse_json(path.read_bytes())
    if not isinstance(summary, dict):
        raise ConfigError(f"{path} is not a JSON object; remove it, a run rewrites it after every step")
    return summary


def parse_json(text: bytes) -> Any:
    """The value, or None where the text is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def dig(tree: Any, *keys: str) -> Any:
    """`tree[key][key]…`, or None where a piece is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
