"""The figures of metrics.jsonl and of evaluations as TensorBoard scalars, for who wants them there, too."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april.broker.telemetry.sink import Sink
from april.config import ConfigError

LEFT_OUT = ("step", "time", "lanes", "lengths")
"""of a step's record: its place, and what is no scalar"""


NAMED_BY_STEP = "version_share_"
"""of the learner's figures: each step would have tags of its own; the staleness by age says the same"""


class TensorBoard(Sink):
    """Writes event files into `tensorboard/` of the run folder, with `tensorboard` alone."""

    def __init__(self, run_dir: Path):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__(run_dir)
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    @classmethod
    def check(cls) -> None:
        if not find_spec("tensorboard"):
            raise ConfigError(
                "key 'operations.sinks' = 'tensorboard' needs the package tensorboard, which is not installed; "
                "pip install 'april-rl[tensorboard]', or leave it out"
            )

    def step(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._write(record["step"], record["time"], {k: v for k, v in record.items() if k not in LEFT_OUT})

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        figures = {name: result[name] for name in ("accuracy", "mean_at_k", "pass_at_k")}
        self._write(result["step"], now, {"evaluation": figures})

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time: float, figures: dict[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(figures)]
        self._writer.add_event(self._event(step=step, wall_time=time, summary=self._summary(value=values)))
        self._writer.flush()


def scalars(figures: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """(tag, value) of every number in nested mappings but those named by step, the keys joined by slashes."""
    found = []
    for name, value in figures.items():
        if isinstance(value, dict):
            found += scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not name.startswith(NAMED_BY_STEP):
            found.append((f"{prefix}{name}", float(value)))
    return found
