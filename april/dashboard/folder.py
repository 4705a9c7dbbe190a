"""The runs that a dashboard shows: one, those of a folder, or a live broker's; read ahead in one thread while somebody
looks at them."""

import logging
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from april.config import ConfigError, check_address
from april.dashboard.index import SampleIndex
from april.dashboard.live import Live
from april.dashboard.steps import Steps
from april.formats.versions import RUN_FOLDER
from april.launch.operate import Target
from april.processes import heap
from april.report.run_folder import dig, read_summary

log = logging.getLogger(__name__)

LIVE = "live"
"""name of a run that is known by its broker alone"""
PAUSE_S = 0.5
"""between two looks at the files"""
TURN_S = 0.2
"""of reading for one run, before it is another's turn"""
WAIT_S = 0.02
"""between two looks at what the reader has read"""
AWAY_S = 60.0
"""since a run was asked for last; it is not followed any more"""
MOST_INDEXES = 2
"""samples of so many runs are kept in memory; those asked for longest ago are let go"""


class WatchedRun:
    def __init__(self, name: str, path: Path | None, target: Target):
        self.name, self.path = name, path
        self.live = Live(target)
        self.steps = Steps(path) if path else None
        self.index: SampleIndex | None = None
        self.problem = ""
        """why its files cannot be followed at the moment"""
        self.asked_at = time.monotonic()
        self.all_read = False

    @property
    def config(self) -> dict[str, Any]:
        return read_config(self.path) if self.path else {}

    @property
    def model(self) -> Path:
        """The policy's folder; a path that is not absolute was meant from where the run was started."""
        config = self.config
        model, runs = (Path(str(dig(config, *keys) or "")) for keys in (("model", "path"), ("run", "dir")))
        if self.path is None or model.is_absolute() or runs.is_absolute():
            return model
        started_in = self.path.resolve().parents[len(runs.parts)]
        return started_in / model if (started_in / model).is_dir() else model

    def read_on(self, budget_s: float) -> bool:
        """Read what is new of its files for about so long; whether that was all."""
        if self.steps is None:
            return True
        try:
            whole = self.steps.follow(budget_s)
            self.problem = ""
        except (ConfigError, OSError) as error:
            self.problem = str(error)
            return True
        index, deadline = self.index, time.monotonic() + budget_s
        if index is not None and whole:
            if not index.pending:
                index.look()
            while more := index.advance():
                if time.monotonic() > deadline:
                    break
            whole = not more
        self.all_read = whole
        return whole

    def news(self) -> dict[str, Any]:
        """What changes while the run goes on."""
        index = self.index
        return {
            "steps": len(self.steps) if self.steps else 0,
            "all_read": self.all_read,
            "problem": self.problem,
            "samples": index and {"rows": index.count, "files": index.steps_read, "kept": index.steps_kept},
            "state": self.state,
        }

    @property
    def state(self) -> str:
        summary = quiet_summary(self.path) if self.path else {}
        return summary.get("state") or "running"


class Runs:
    """`Runs("runs/NAME")`, `Runs("runs")` or `Runs("tcp://HOST:PORT")`. Raises ConfigError for anything else."""

    def __init__(self, what: str, keys: Path | None = None):
        self._keys, self._lock = keys, threading.Lock()
        self._watched: dict[str, WatchedRun] = {}
        self._closed = threading.Event()
        if "://" in what:
            self.folder, self.single = None, None
            self._watched[LIVE] = WatchedRun(LIVE, None, Target(None, check_address(what), keys))
        else:
            self.folder, self.single = place(Path(what))
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def names(self) -> list[str]:
        if self.folder is None:
            return [self.single.resolve().name] if self.single else [LIVE]
        return sorted(path.name for path in self.folder.iterdir() if (path / "config.toml").is_file())

    def find(self, name: str, samples: bool = False) -> WatchedRun:
        """A run, followed from now on; its samples too, if asked for. Raises LookupError, and ConfigError for a folder
        of another April."""
        with self._lock:
            run = self._watched.get(name)
            if run is None:
                if name not in self.names():
                    raise LookupError(f"run {name!r} is not here; there are {', '.join(self.names()) or 'none'}")
                path = self.single or (self.folder or Path()) / name
                RUN_FOLDER.check(path)
                run = self._watched[name] = WatchedRun(name, path, Target(path, None, self._keys))
            run.asked_at = time.monotonic()
            if samples and run.index is None and run.path:
                run.index = SampleIndex(run.path)
                run.index.look()
                run.all_read = False
                self._let_go(run)
        if run.steps is not None and not len(run.steps):
            run.read_on(TURN_S)
        if run.index is not None and not run.index.steps_read:
            self._wait_for_samples(run)
        return run

    def _wait_for_samples(self, run: WatchedRun) -> None:
        """For the first of them, which the reader is about to read."""
        deadline = time.monotonic() + 2 * PAUSE_S
        while time.monotonic() < deadline and not (run.all_read or (run.index and run.index.steps_read)):
            time.sleep(WAIT_S)

    def _let_go(self, kept: WatchedRun) -> None:
        """Of samples that nobody looks at."""
        having = [run for run in self._watched.values() if run.index is not None and run is not kept]
        for run in sorted(having, key=lambda run: run.asked_at)[: len(having) + 1 - MOST_INDEXES]:
            run.index = None

    def describe(self) -> list[dict[str, Any]]:
        """Of each run what a list of them says."""
        return [self._describe(name) for name in self.names()]

    def _describe(self, name: str) -> dict[str, Any]:
        path = self.single or (self.folder / name if self.folder else None)
        if path is None:
            return {"name": name, "state": "running", "steps": None, "reward": None, "live": True, "folder": False}
        summary, config = quiet_summary(path), read_config(path)
        return {
            "name": name,
            "folder": True,
            "state": summary.get("state") or "running",
            "steps": summary.get("steps"),
            "max_steps": summary.get("max_steps") or dig(config, "schedule", "max_steps"),
            "reward": dig(summary, "reward", "last3"),
            "wall_s": summary.get("wall_s"),
            "kind": dig(config, "schedule", "kind"),
            "model": dig(config, "model", "path"),
            "live": (path / "address").is_file() and (summary.get("state") or "running") == "running",
        }

    def _read(self) -> None:
        while not self._closed.wait(0.0):
            with self._lock:
                wanted = [run for run in self._watched.values() if time.monotonic() - run.asked_at < AWAY_S]
            whole = [run.read_on(TURN_S) for run in wanted]
            if wanted:
                heap.give_back()
            if all(whole) and self._closed.wait(PAUSE_S):
                return


def place(path: Path) -> tuple[Path | None, Path | None]:
    """(folder of runs, run): one of them. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"run folder {path} does not exist; give the folder of a run, of runs, or tcp://HOST:PORT")
    if (path / "config.toml").is_file():
        RUN_FOLDER.check(path)
        return None, path
    if not any(path.glob("*/config.toml")):
        raise ConfigError(f"{path} is neither a run folder nor has it any; give a folder such as runs/NAME, or runs")
    return path, None


def read_config(path: Path) -> dict[str, Any]:
    """Empty where it cannot be read: nothing that is shown depends on it."""
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def quiet_summary(path: Path) -> dict[str, Any]:
    try:
        return read_summary(path / "summary.json")
    except (ConfigError, OSError):
        return {}
