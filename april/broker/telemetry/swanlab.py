"""Metrics sink for SwanLab."""

import os
from typing import Any

from april.broker.telemetry.behind import PROJECT, BackgroundSink


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
