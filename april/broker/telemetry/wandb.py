"""Metrics sink for Weights & Biases."""

import os
from typing import Any

from april.broker.telemetry.behind import PROJECT, BackgroundSink


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
