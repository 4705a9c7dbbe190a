"""Metrics sink for trackio, whose page `trackio show` opens."""

import os
from typing import Any

from april.broker.telemetry.behind import PROJECT, BackgroundSink


class Trackio(BackgroundSink):
    """Logs on this machine, in the folder `TRACKIO_DIR`, in the project `TRACKIO_PROJECT` or `april-rl`."""

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
