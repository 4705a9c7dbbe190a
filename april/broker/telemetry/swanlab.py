"""The figures of a run for SwanLab: kept in `swanlab/` of the run folder, and sent where `SWANLAB_MODE` says so."""

import os
from typing import Any

from april.broker.telemetry.behind import PROJECT, SinkBehind


class SwanLab(SinkBehind):
    """Offline unless `SWANLAB_MODE` is another: `swanlab sync` uploads it later. In the project `SWANLAB_PROJECT`."""

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
