"""Metrics sink for an MLflow server."""

import os

from april.broker.telemetry.behind import PROJECT, BackgroundSink
from april.errors import refuse

URI = "MLFLOW_TRACKING_URI"
BATCH = 1000
"""Most metrics that a server takes in one request."""


class MLflow(BackgroundSink):
    """Logs to the server at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME` or `april-rl`."""

    package = "mlflow"

    @classmethod
    def check(cls) -> None:
        super().check()
        if not os.environ.get(URI):
            refuse(
                "operations.sinks", "mlflow", "needs to know the server", f"set {URI}=http://HOST:PORT, or leave it out"
            )

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=os.environ[URI])
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
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + BATCH])

    def end(self) -> None:
        self._client.set_terminated(self._run)
