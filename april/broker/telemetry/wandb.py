"""The figures of a run at Weights & Biases: kept in `wandb/` of the run folder, and sent where `WANDB_MODE` says so."""

import os
from typing import Any

from april.broker.telemetry.behind import PROJECT, SinkBehind


class WeightsAndBiases(SinkBehind):
    """Offline unless `WANDB_MODE` is `online`: `wandb sync` uploads it later. `WANDB_PROJECT`, `WANDB_ENTITY` and the
    rest of its environment variables hold."""

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
