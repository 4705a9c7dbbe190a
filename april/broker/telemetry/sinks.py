"""Metrics sinks: receivers of a run's metrics outside its folder, such as a service that plots curves. The base
classes, and the sinks that ship with April."""

import logging
import os
import queue
import re
import threading
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april.util.errors import refuse
from april.util.registry import Registry, call_each

log = logging.getLogger(__name__)

SINKS = Registry(
    "operations.sinks",
    "metrics sink",
    {
        "tensorboard": "april.broker.telemetry.sinks:TensorBoard",
        "wandb": "april.broker.telemetry.sinks:WeightsAndBiases",
        "mlflow": "april.broker.telemetry.sinks:MLflow",
        "trackio": "april.broker.telemetry.sinks:Trackio",
        "swanlab": "april.broker.telemetry.sinks:SwanLab",
    },
    base="april.broker.telemetry.sinks:Sink",
)


class Sink:
    """Base class of metrics sinks. A sink is created at each start of the broker; a step that an earlier broker has
    passed to it is not passed again.

    Its methods run in the broker's loop and have to be fast; `BackgroundSink` writes in a thread of its own.
    """

    package = ""
    """Python package that the sink needs; April's optional dependency of the same name installs it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if something that the sink needs is missing."""
        if cls.package and not find_spec(cls.package):
            refuse(
                "operations.sinks",
                cls.package,
                f"needs the package {cls.package}, which is not installed",
                f"pip install 'april-rl[{cls.package}]', or leave it out",
            )

    def step(self, record: dict[str, Any]) -> None:
        """Receive the record of a trained step, as in metrics.jsonl."""

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        """Receive a complete evaluation: `step`, `accuracy`, `mean_at_k`, `pass_at_k`, .... `now`: Unix time in
        seconds."""

    def close(self) -> None:
        """Close the sink when the broker ends."""


class Sinks:
    """The sinks of a run. One that raises an exception is dropped, since no metric is worth a run."""

    def __init__(self, names: Sequence[str], run_dir: Path):
        """Create the sinks by name. Raises ConfigError for a sink that is not found, or that lacks something it
        needs."""
        check_sinks(names)
        self._names = names
        self._sinks: dict[str, Sink] = {name: SINKS.find(name)(run_dir) for name in names}

    @property
    def failed(self) -> list[str]:
        """Names of the sinks that were dropped because they raised an exception."""
        return [name for name in self._names if name not in self._sinks]

    def step(self, record: dict[str, Any]) -> None:
        call_each(self._sinks, "metrics sink", lambda sink: sink.step(record))

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        call_each(self._sinks, "metrics sink", lambda sink: sink.evaluation(result, now))

    def close(self) -> None:
        call_each(self._sinks, "metrics sink", lambda sink: sink.close())


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError unless every sink is found and has what it needs."""
    for name in names:
        SINKS.find(name).check()


# --- metrics as names and numbers -------------------------------------------------------------------------------------


NOT_METRICS = ("step", "time", "timeline", "lengths", "alarms")
"""Keys of a step's record that a sink does not get as metrics: its step and time, and values that are not scalars."""
NAMED_BY_STEP = "version_share_"
"""Prefix of the learner metrics that sinks do not get: their names end in a policy step, so each step would add new
names. The staleness metrics show the same."""


def step_metrics(record: dict[str, Any]) -> dict[str, float]:
    """Scalar metrics of a step's record in metrics.jsonl, with a metric of value 1 for each alarm that it raises."""
    figures = scalars({name: value for name, value in record.items() if name not in NOT_METRICS})
    return figures | {f"alarms/{alarm['name']}": 1.0 for alarm in record.get("alarms", ())}


SCORES = ("accuracy", "reward", "mean_at_k", "pass_at_k", "loss")


def evaluation_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Scores of an evaluation as scalar metrics by name: those of its first evaluation set and, if there are several
    sets, those of each under `evaluation/sets/NAME`."""
    sets = {name: {score: found.get(score) for score in SCORES} for name, found in result.get("sets", {}).items()}
    return scalars({"evaluation": {score: result.get(score) for score in SCORES} | {"sets": sets}})


def scalars(figures: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers in nested mappings, except those named by step (`NAMED_BY_STEP`), by their keys joined with slashes.
    `prefix`: beginning of every key."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not name.startswith(NAMED_BY_STEP):
            found[f"{prefix}{name}"] = float(value)
    return found


NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")
"""Regular expression for a character that some services refuse in a metric's name."""


def plain_names(figures: dict[str, float]) -> dict[str, float]:
    """The figures under names that any service accepts: letters, digits, `_`, `-` and `.` in parts between slashes.

    A name that is plain already stays; one that would become the name of another figure gets a `_` more.
    """
    renamed: dict[str, float] = {}
    for name in sorted(figures, key=lambda name: plain_name(name) != name):
        plain = plain_name(name)
        while plain in renamed:
            plain += "_"
        renamed[plain] = figures[name]
    return renamed


def plain_name(name: str) -> str:
    parts = (NOT_PLAIN.sub("_", part).strip(".") for part in name.split("/"))
    return "/".join(filter(None, parts)) or "_"


# --- services that may be slow ----------------------------------------------------------------------------------------


PROJECT = "april-rl"
"""Default name of the project, or experiment, that runs belong to at a service."""
MOST_WAITING = 1000
"""Most entries that wait for the service; with more, the sink fails."""
CLOSE_S = 30.0
"""Longest wait, at the end of a run, until the service has received all entries."""

Entry = tuple[int, float, dict[str, float]]
"""(step, Unix time in seconds, metrics by name)."""


class BackgroundSink(Sink):
    """Base class of sinks for services that may be slow.

    Calls `open`, then `write` for each entry, then `end`, in a thread of its own.
    """

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self._entries: queue.Queue[Entry | None] = queue.Queue(MOST_WAITING)
        self._error: Exception | None = None
        self._needs_plain_names = False
        """Whether the service has refused a name."""
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open a run at the service, or resume it after a restart of the broker."""

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        """Write the metrics `figures` of a trained step or of an evaluation; `time`: Unix seconds."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the run at the service; every entry has been written."""

    def step(self, record: dict[str, Any]) -> None:
        self._put((record["step"], record["time"], step_metrics(record)))

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        self._put((result["step"], now, evaluation_metrics(result)))

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"not all figures were taken within {CLOSE_S:g} s; look after the service")
        self._raise()

    def run_id(self) -> str:
        """Id of this run at the service, which stays the same over restarts of the broker."""
        path = self.run_dir / f"{self.package}.id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    def _put(self, entry: Entry | None) -> None:
        self._raise()
        self._entries.put_nowait(entry)

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _write(self, step: int, time: float, figures: dict[str, float]) -> None:
        """Write an entry by `write` (`time`: Unix seconds; `figures`: metrics by name). If the service refuses the
        names of the metrics, plain names (`plain_names`) are used for this entry and all later ones."""
        plain = plain_names(figures)
        if self._needs_plain_names or plain.keys() == figures.keys():
            return self.write(step, time, plain)
        try:
            self.write(step, time, figures)
        except Exception as refusal:
            self.write(step, time, plain)
            odd = next(name for name in figures if name not in plain)
            log.warning("%s refuses names such as %r, and gets plain ones: %s", type(self).__name__, odd, refusal)
            self._needs_plain_names = True

    def _serve(self) -> None:
        try:
            self.open()
            while entry := self._entries.get():
                self._write(*entry)
            self.end()
        except Exception as error:
            self._error = error


# --- shipped sinks ----------------------------------------------------------------------------------------------------


class TensorBoard(Sink):
    """Writes event files into `tensorboard/` of the run folder; needs only the package `tensorboard`."""

    package = "tensorboard"

    def __init__(self, run_dir: Path):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__(run_dir)
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def step(self, record: dict[str, Any]) -> None:
        self._write(record["step"], record["time"], step_metrics(record))

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        self._write(result["step"], now, evaluation_metrics(result))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time: float, figures: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(self._event(step=step, wall_time=time, summary=self._summary(value=values)))
        self._writer.flush()


class WeightsAndBiases(BackgroundSink):
    """Logs to `wandb/` of the run folder.

    Offline unless `WANDB_MODE` is `online`; `wandb sync` uploads later. `WANDB_PROJECT`, `WANDB_ENTITY` and wandb's
    other environment variables apply.
    """

    package = "wandb"

    def open(self) -> None:
        import wandb

        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            mode=mode,
            dir=str(self.run_dir),
            id=self.run_id(),
            name=self.run_dir.name,
            resume="allow",
            settings=quiet,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        self._run.log({**figures, "step": step, "time": time})

    def end(self) -> None:
        self._run.finish()


MLFLOW_URI = "MLFLOW_TRACKING_URI"
MLFLOW_BATCH = 1000
"""Most metrics that an MLflow server accepts in one request."""


class MLflow(BackgroundSink):
    """Logs to the server at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME` or `april-rl`."""

    package = "mlflow"

    @classmethod
    def check(cls) -> None:
        super().check()
        if not os.environ.get(MLFLOW_URI):
            refuse(
                "operations.sinks",
                "mlflow",
                "needs to know the server",
                f"set {MLFLOW_URI}=http://HOST:PORT, or leave it out",
            )

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=os.environ[MLFLOW_URI])
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), self.run_id()
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment_id], f"tags.april_run = '{tag}'")
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
        else:
            created = self._client.create_run(experiment_id, run_name=self.run_dir.name, tags={"april_run": tag})
            self._run = created.info.run_id

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        metrics = [self._metric(name, value, int(1000 * time), step) for name, value in figures.items()]
        for first in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + MLFLOW_BATCH])

    def end(self) -> None:
        self._client.set_terminated(self._run)


class Trackio(BackgroundSink):
    """Logs on this machine, in the folder `TRACKIO_DIR`, in the project `TRACKIO_PROJECT` or `april-rl`.

    `trackio show` opens its page.
    """

    package = "trackio"

    def open(self) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{self.run_dir.name}-{self.run_id()[:8]}",
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def end(self) -> None:
        self._run.finish()


class SwanLab(BackgroundSink):
    """Logs to `swanlab/` of the run folder, in the project `SWANLAB_PROJECT`.

    Offline unless `SWANLAB_MODE` says otherwise; `swanlab sync` uploads later.
    """

    package = "swanlab"

    def open(self) -> None:
        import swanlab

        self._run: Any = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            experiment_name=self.run_dir.name,
            logdir=str(self.run_dir / "swanlab"),
        )

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def end(self) -> None:
        import swanlab

        swanlab.finish()
