"""The runs that a dashboard shows: one, those of a folder, or a live broker's. One thread follows the files of the runs
that are being viewed."""

import logging
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from april.config import ConfigError, check_address
from april.config.stored import held_out_score
from april.observe.dashboard.index import SampleIndex
from april.observe.dashboard.run_page import last_evaluation
from april.observe.dashboard.steps import Steps
from april.observe.operate import RunAddress
from april.observe.report.facts import measure_of
from april.observe.report.run_folder import RunFolder, dig, read_summary
from april.observe.report.timeline import waiting_for
from april.util import resources
from april.util.versions import RUN_FOLDER
from april.wire.sockets.broker import AccessDenied, BrokerRefused, BrokerUnreachable

log = logging.getLogger(__name__)

# --- live status ------------------------------------------------------------------------------------------------------

MAX_AGE_S = 1.0
"""Age up to which the broker's last status is reused, seconds."""


class LiveStatus:
    """The status of a live broker, requested at most once in MAX_AGE_S for all viewers together."""

    def __init__(self, target: RunAddress):
        self._target = target
        self._lock = threading.Lock()
        self._answer: dict[str, Any] = {}
        self._asked_at = float("-inf")

    def get(self) -> dict[str, Any]:
        """{"status": the broker's status, "sentence": what the run waits for, "at": time of the status in Unix
        seconds}; if no broker answers, {"away": the reason}."""
        with self._lock:
            if time.monotonic() - self._asked_at >= MAX_AGE_S:
                self._answer = self._ask()
                self._asked_at = time.monotonic()
            return self._answer

    def _ask(self) -> dict[str, Any]:
        try:
            status = self._target.status()
        except (AccessDenied, BrokerRefused, BrokerUnreachable, ConfigError) as error:
            return {"away": str(error)}
        return {"status": status, "sentence": waiting_for(status), "at": time.time()}


# --- runs -------------------------------------------------------------------------------------------------------------

VIEWS = ["run", "now", "timeline", "samples", "compare", "logs"]
"""Names of the pages that the browser offers for a run whose folder the dashboard can read."""
LIVE = "live"
"""Name under which the dashboard lists a run of which it knows only the broker's address, not the folder."""
PAUSE_S = 0.5
"""Pause between two scans of the runs' files, seconds."""
READ_BUDGET_S = 0.2
"""Time spent reading one run's files before the next run's files are read, seconds."""
POLL_S = 0.02
"""Interval at which `find` checks whether the reader thread has read the first samples, seconds."""
IDLE_S = 60.0
"""Time without a request after which a run's files are no longer followed, seconds."""
MAX_INDEXES = 2
"""Maximum number of runs whose sample index is kept in memory; the least recently requested is evicted first."""


class WatchedRun:
    """One run: its live status, steps and, once requested, its sample index."""

    def __init__(self, name: str, path: Path | None, target: RunAddress):
        self.name, self.path = name, path
        self.live = LiveStatus(target)
        self.steps = Steps(path) if path else None
        self.index: SampleIndex | None = None
        self.problem = ""
        """Reason why the run's files cannot be read at the moment; "" if they can be read."""
        self.asked_at = time.monotonic()
        self.all_read = False

    @property
    def config(self) -> dict[str, Any]:
        return read_config(self.path) if self.path else {}

    @property
    def model(self) -> Path:
        """The policy's folder; a relative path is resolved from the folder in which the run was started."""
        config = self.config
        model, runs = (Path(str(dig(config, *keys) or "")) for keys in (("model", "path"), ("run", "dir")))
        if self.path is None or model.is_absolute() or runs.is_absolute():
            return model
        started_in = self.path.resolve().parents[len(runs.parts)]
        return started_in / model if (started_in / model).is_dir() else model

    def read_new(self, budget_s: float) -> bool:
        """Read new data in the run's files for about `budget_s` seconds; returns whether everything was read."""
        if self.steps is None:
            return True
        try:
            is_complete = self.steps.follow(budget_s)
            self.problem = ""
        except (ConfigError, OSError) as error:
            self.problem = str(error)
            return True
        index, deadline = self.index, time.monotonic() + budget_s
        if index is not None and is_complete:
            if not index.pending:
                index.scan()
            while advanced := index.advance():
                if time.monotonic() > deadline:
                    break
            is_complete = not advanced
        self.all_read = is_complete
        return is_complete

    def progress(self) -> dict[str, Any]:
        """Summary of the run's progress for the browser: the figures that change during the run."""
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
        summary = summary_or_empty(self.path) if self.path else {}
        return summary.get("state") or "running"


class Runs:
    """The runs of a dashboard: `Runs("runs/NAME")` one run folder, `Runs("runs")` all runs of a folder,
    `Runs("tcp://HOST:PORT")` a live broker's run. Raises ConfigError for anything else."""

    def __init__(self, source: str, keys: Path | None = None):
        self._keys, self._lock = keys, threading.Lock()
        self._watched: dict[str, WatchedRun] = {}
        self._closed = threading.Event()
        if "://" in source:
            self.folder, self.single = None, None
            self._watched[LIVE] = WatchedRun(LIVE, None, RunAddress(None, check_address(source), keys))
        else:
            self.folder, self.single = locate(Path(source))
        threading.Thread(target=self._read_loop, name="reader", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def names(self) -> list[str]:
        if self.folder is None:
            return [self.single.resolve().name] if self.single else [LIVE]
        return sorted(path.name for path in self.folder.iterdir() if (path / "config.toml").is_file())

    def find(self, name: str, samples: bool = False) -> WatchedRun:
        """The run of that name, followed from now on, with its samples if `samples`. Raises LookupError for an unknown
        name, and ConfigError for a run folder of an incompatible version."""
        with self._lock:
            run = self._watched.get(name)
            if run is None:
                if name not in self.names():
                    raise LookupError(f"run {name!r} is not here; there are {', '.join(self.names()) or 'none'}")
                path = self.single or (self.folder or Path()) / name
                RUN_FOLDER.check(path)
                run = self._watched[name] = WatchedRun(name, path, RunAddress(path, None, self._keys))
            run.asked_at = time.monotonic()
            if samples and run.index is None and run.path:
                run.index = SampleIndex(run.path)
                run.index.scan()
                run.all_read = False
                self._evict_indexes(run)
        if run.steps is not None and not len(run.steps):
            run.read_new(READ_BUDGET_S)
        if run.index is not None and not run.index.steps_read:
            self._wait_for_samples(run)
        return run

    def _wait_for_samples(self, run: WatchedRun) -> None:
        """Wait until the reader thread has read the first samples, for at most two of its pauses (`PAUSE_S`)."""
        deadline = time.monotonic() + 2 * PAUSE_S
        while time.monotonic() < deadline and not (run.all_read or (run.index and run.index.steps_read)):
            time.sleep(POLL_S)

    def _evict_indexes(self, kept: WatchedRun) -> None:
        """Drop the sample indexes of the least recently requested runs, so that at most MAX_INDEXES remain. That of the
        run `kept` is never dropped."""
        indexed = [run for run in self._watched.values() if run.index is not None and run is not kept]
        for run in sorted(indexed, key=lambda run: run.asked_at)[: len(indexed) + 1 - MAX_INDEXES]:
            run.index = None

    def describe(self) -> list[dict[str, Any]]:
        """The list of runs for the browser, one entry per run."""
        return [self._describe(name) for name in self.names()]

    def _describe(self, name: str) -> dict[str, Any]:
        path = self.single or (self.folder / name if self.folder else None)
        if path is None:
            return {"name": name, "state": "running", "steps": None, "reward": None, "live": True, "views": ["now"]}
        summary, config = summary_or_empty(path), read_config(path)
        evaluated = RunFolder(path, "", config, [], summary)
        comparable = evaluated.evaluation_sets[-1] if evaluated.evaluation else []
        scores = [score for point in comparable if (score := held_out_score(point)[1]) is not None]
        best = min if measure_of(comparable) == "loss" else max
        return {
            "name": name,
            "views": VIEWS,
            "state": summary.get("state") or "running",
            "steps": summary.get("steps"),
            "max_steps": summary.get("max_steps") or dig(config, "schedule", "max_steps"),
            "reward": dig(summary, "reward", "last3"),
            "held_out": last_evaluation(evaluated),
            "best_held_out": best(scores, default=None),
            "wall_s": summary.get("wall_s"),
            "kind": dig(config, "schedule", "kind"),
            "model": dig(config, "model", "path"),
            "live": (path / "address").is_file() and (summary.get("state") or "running") == "running",
        }

    def _read_loop(self) -> None:
        while not self._closed.wait(0.0):
            try:
                complete = self._read_followed()
            except Exception:
                log.exception("a run cannot be read; it is tried again")
                complete = True
            if complete and self._closed.wait(PAUSE_S):
                return

    def _read_followed(self) -> bool:
        """Read new data of the runs that were requested within the last IDLE_S seconds; returns whether everything was
        read."""
        with self._lock:
            followed = [run for run in self._watched.values() if time.monotonic() - run.asked_at < IDLE_S]
        complete = [run.read_new(READ_BUDGET_S) for run in followed]
        if followed:
            resources.return_free_pages()
        return all(complete)


def locate(path: Path) -> tuple[Path | None, Path | None]:
    """(`path`, None) if it is a folder of runs, (None, `path`) if it is the folder of one run. Raises ConfigError if it
    is neither."""
    if not path.is_dir():
        raise ConfigError(f"run folder {path} does not exist; give the folder of a run, of runs, or tcp://HOST:PORT")
    if (path / "config.toml").is_file():
        RUN_FOLDER.check(path)
        return None, path
    if not any(path.glob("*/config.toml")):
        raise ConfigError(f"{path} is neither a run folder nor has it any; give a folder such as runs/NAME, or runs")
    return path, None


def read_config(path: Path) -> dict[str, Any]:
    """The run's configuration; {} if it cannot be read, since no page depends on it."""
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def summary_or_empty(path: Path) -> dict[str, Any]:
    try:
        return read_summary(path / "summary.json")
    except (ConfigError, OSError):
        return {}
