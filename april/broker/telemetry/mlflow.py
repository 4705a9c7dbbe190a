"""The figures of a run as metrics of an MLflow server."""

import os

from april.broker.telemetry.behind import PROJECT, SinkBehind
from april.config import ConfigError

URI = "MLFLOW_TRACKING_URI"
BATCH = 1000
"""most metrics that a server takes at once"""


class MLflow(SinkBehind):
    """At the server that `MLFLOW_TRACKING_URI` names, in the experiment `MLFLOW_EXPERIMENT_NAME` or `april-rl`."""

    package = "mlflow"

    @classmethod
    def check(cls) -> None:
        super().check()
        if not os.environ.get(URI):
            raise ConfigError(
                f"key 'operations.sinks' = 'mlflow' needs to know the server; set {URI}=http://HOST:PORT, or leave it "
                "out"
            )

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=os.environ[URI])
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), self.run_id()
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        earlier = self._client.search_runs([place], f"tags.april_run = '{tag}'")
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
        else:
            made = self._client.create_run(place, run_name=self.run_dir.name, tags={"april_run": tag})
            self._run = made.info.run_id

    def write(self, step: int, time: float, figures: dict[str, float]) -> None:
        metrics = [self._metric(name, value, int(1000 * time), step) for name, value in figures.items()]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + BATCH])

    def end(self) -> None:
        self._client.set_terminated(self._run)
