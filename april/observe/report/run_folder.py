"""Read a run folder: configuration, trained steps and summary, also while the run is still going."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tomli_w

from april.config import ConfigError
from april.config.stored import held_out_score, is_step
from april.util.text import masked
from april.util.versions import RUN_FOLDER


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; any field of `records` and `summary` may be absent or null."""

    path: Path
    config_text: str
    """The configuration to be shown, as TOML without its secrets."""
    config: dict
    records: list[dict]
    """Records of trained steps: lines of metrics.jsonl, in file order. A step that was trained again after a restart
    has several."""
    summary: dict

    @property
    def name(self) -> str:
        return self.summary.get("run") or dig(self.config, "run", "name") or self.path.resolve().name

    @property
    def state(self) -> str:
        return self.summary.get("state") or "running"

    @property
    def steps(self) -> list[dict]:
        """One record per step, in order; of a step that was trained again after a restart the last record."""
        by_step = {record["step"]: record for record in self.records}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def worker_events(self) -> list[dict]:
        """Timeline events of the workers from all records (key `timeline`): spans of generation and weight update;
        joins, aborts and losses."""
        events = [event for record in self.records for event in record.get("timeline") or []]
        return [event for event in events if event.get("worker") and event.get("start") is not None]

    @property
    def resumes(self) -> list[dict]:
        """Resumes of the run: `time`, the `step` that it had reached, and the `changed` configuration keys."""
        return [line for line in read_lines(self.path / "resumes.jsonl") if isinstance(line.get("step"), int)]

    @property
    def evaluation_sets(self) -> list[list[dict]]:
        """Evaluations in order, divided into lists within which accuracies are comparable: a new list begins wherever
        the evaluation's prompts or configuration changed."""
        sets: list[list[dict]] = []
        for point in self.evaluation:
            before = sets[-1][-1] if sets else None
            if (
                before is None
                or evaluation_size(before) != evaluation_size(point)
                or self._evaluation_changed(before, point)
            ):
                sets.append([])
            sets[-1].append(point)
        return sets

    def _evaluation_changed(self, before: dict, after: dict) -> bool:
        """Whether a resume of the run changed configuration keys of the evaluation between two evaluations, given by
        their records."""
        first, last = before.get("step") or 0, after.get("step") or 0
        return any(
            first <= resume["step"] < max(last, first + 1) and any(map(affects_evaluation, resume.get("changed") or []))
            for resume in self.resumes
        )

    @property
    def pace(self) -> list[dict]:
        """Reports of the paced (simulated) engines, one per engine: steps, and late steps that took longer than on the
        imitated hardware."""
        return [orjson.loads(path.read_bytes()) for path in sorted(self.path.glob("paced/*.json"))]

    @property
    def named_evaluations(self) -> dict[str, list[dict]]:
        """Evaluations by the name of their held-out set, where sets are named; oldest first."""
        points = sorted(self.summary.get("evaluation") or [], key=lambda point: point.get("step") or 0)
        return evaluations_by_set(points)

    @property
    def evaluation(self) -> list[dict]:
        """Held-out evaluations with an accuracy or a reward, oldest first. If a run has several evaluation sets, the
        figures are those of the first one."""
        points = [point for point in self.summary.get("evaluation") or [] if held_out_score(point)[1] is not None]
        return sorted(points, key=lambda point: point.get("step") or 0)


def evaluations_by_set(points: list[dict]) -> dict[str, list[dict]]:
    """Name of a held-out set -> list of its evaluations, in the order of `points` (records of evaluations): each has
    the `step` and the figures of the set. Those without an accuracy or a reward are left out."""
    by_set: dict[str, list[dict]] = {}
    for point in points:
        for name, scores in (point.get("sets") or {}).items():
            if held_out_score(scores)[1] is not None:
                by_set.setdefault(name, []).append({"step": point.get("step") or 0, **scores})
    return by_set


def read_run(run_dir: str | Path) -> RunFolder:
    """Read the run folder `runs/NAME`. Raises ConfigError for a folder that is not a run's, or a damaged file."""
    path = Path(run_dir)
    if not path.is_dir():
        raise ConfigError(f"run folder {path} does not exist; give the folder of a run, such as runs/NAME")
    config_path = path / "config.toml"
    if not config_path.is_file():
        raise ConfigError(f"{path} is not a run folder: {config_path} does not exist; give a folder such as runs/NAME")
    RUN_FOLDER.check(path)
    try:
        config = tomllib.loads(config_path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{config_path} is not TOML: {error}; mend that line") from None
    return RunFolder(
        path, shown_config(config), config, read_records(path / "metrics.jsonl"), read_summary(path / "summary.json")
    )


def shown_config(config: dict) -> str:
    """A configuration as TOML, without its secrets."""
    return tomli_w.dumps(masked(config))


def evaluation_size(point: dict) -> tuple:
    """(number of prompts including failed ones, samples per prompt) of `point`, the metrics.jsonl line of an
    evaluation."""
    prompts = (point.get("prompts") or 0) + (point.get("failed") or 0)
    return prompts, dig(point, "mean_at_k", "k")


def affects_evaluation(change: str) -> bool:
    return change.startswith(("data.eval", "evaluation.", "data.reward", "reward."))


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a JSONL file; [] without the file."""
    found = [parse_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return [line for line in found if isinstance(line, dict)]


def read_records(path: Path) -> list[dict]:
    """Complete lines of metrics.jsonl of trained steps; a last line that is still being written is left out."""
    return [record for record, _, _ in records_from(path) if is_step(record)]


def records_from(path: Path, offset: int = 0, lines: int = 0) -> Iterator[tuple[dict, int, int]]:
    """Yield (record, start byte, end byte) of each line of metrics.jsonl from byte `offset` on, before which the file
    has `lines` lines. A last line without its newline is still being written and ends the iteration."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        bad = 0
        for number, line in enumerate(file, start=lines + 1):
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            if bad:
                raise ConfigError(f"{path} line {bad} is not a JSON object with a step; remove that line")
            record = parse_json(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record, start, offset
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
    """The value that the JSON text stands for; None if it is not valid JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def dig(tree: Any, *keys: str) -> Any:
    """The value `tree[key][key]…` of nested dictionaries; None if one of them lacks its key."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
