"""Metrics sink that writes TensorBoard scalars."""

from pathlib import Path
from typing import Any

from april.broker.telemetry.figures import of_evaluation, of_step
from april.broker.telemetry.sink import Sink


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
        self._write(record["step"], record["time"], of_step(record))

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        self._write(result["step"], now, of_evaluation(result))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time: float, figures: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(self._event(step=step, wall_time=time, summary=self._summary(value=values)))
        self._writer.flush()
