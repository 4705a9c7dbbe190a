"""A run folder read back: configuration, trained steps and summary, also while the run is still going."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from april.config import ConfigError
from april.formats.metrics import is_step
from april.formats.versions import RUN_FOLDER


@dataclass(frozen=True)
class Run:
    """One run; every piece of `records` and `summary` may be absent or null."""

    path: Path
    config_text: str
    config: dict
    records: list[dict]
    """Lines of metrics.jsonl of trained steps as they were written; a replayed step appears again."""
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
    def resumes(self) -> list[dict]:
        """When the run was resumed: `time`, the `step` that it had reached, and `changed` keys, one line each."""
        return [line for line in read_lines(self.path / "resumes.jsonl") if isinstance(line.get("step"), int)]

    @property
    def evaluation_sets(self) -> list[list[dict]]:
        """Evaluations in order, cut where other prompts were asked, or others of them: they cannot be compared."""
        sets: list[list[dict]] = []
        for point in self.evaluation:
            if not sets or what_is_asked(sets[-1][-1]) != what_is_asked(point) or self._asks_anew(sets[-1][-1], point):
                sets.append([])
            sets[-1].append(point)
        return sets

    def _asks_anew(self, before: dict, after: dict) -> bool:
        """Whether keys that say what an evaluation is were changed between the two."""
        first, last = before.get("step") or 0, after.get("step") or 0
        return any(
            first <= resume["step"] < max(last, first + 1) and any(map(is_of_evaluation, resume.get("changed") or []))
            for resume in self.resumes
        )

    @property
    def pace(self) -> list[dict]:
        """How well each paced engine kept its pace, where there are some."""
        return [orjson.loads(path.read_bytes()) for path in sorted(self.path.glob("paced/*.json"))]

    @property
    def named_evaluations(self) -> dict[str, list[dict]]:
        """By the name of the set, where there are several, or one with a name of its own; oldest first."""
        points = sorted(self.summary.get("evaluation") or [], key=lambda point: point.get("step") or 0)
        return evaluations_by_set(points)

    @property
    def evaluation(self) -> list[dict]:
        """Held-out evaluations that have an accuracy, oldest first; of several sets the first."""
        points = [point for point in self.summary.get("evaluation") or [] if point.get("accuracy") is not None]
        return sorted(points, key=lambda point: point.get("step") or 0)


def evaluations_by_set(found: list[dict]) -> dict[str, list[dict]]:
    """Points that have an accuracy, by the name of their set: `step`, `accuracy`, and what else was found."""
    by_set: dict[str, list[dict]] = {}
    for point in found:
        for name, of_set in (point.get("sets") or {}).items():
            if of_set.get("accuracy") is not None:
                by_set.setdefault(name, []).append({"step": point.get("step") or 0, **of_set})
    return by_set


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


def what_is_asked(point: dict) -> tuple:
    """Prompts and samples a prompt of an evaluation, failed ones included."""
    prompts = (point.get("prompts") or 0) + (point.get("failed") or 0)
    return prompts, dig(point, "mean_at_k", "k")


def is_of_evaluation(change: str) -> bool:
    return change.startswith(("data.eval", "evaluation.", "data.reward", "reward."))


def read_lines(path: Path) -> list[dict]:
    """The lines of a file of JSON objects that are whole."""
    found = [parse_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return [line for line in found if isinstance(line, dict)]


def read_records(path: Path) -> list[dict]:
    """Complete lines of metrics.jsonl of trained steps. A last line that was cut while being written is left out."""
    return [record for record, _, _ in records_from(path) if is_step(record)]


def records_from(path: Path, offset: int = 0, lines: int = 0) -> Iterator[tuple[dict, int, int]]:
    """Those of steps and of evaluations, from a byte on, before which lie so many lines; each with where it begins and
    ends. A line that ends without its end is being written, and the last for now."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        bad = 0
        for number, line in enumerate(file, start=lines + 1):
            begin, offset = offset, offset + len(line)
            if not line.strip():
                continue
            if bad:
                raise ConfigError(f"{path} line {bad} is not a JSON object with a step; remove that line")
            record = parse_json(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record, begin, offset
            elif not line.endswith(b"\n"):
                return
            else:
                bad = number


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
