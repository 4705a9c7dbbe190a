"""Metrics of a run: what is recorded, and the sinks that receive it (`sinks.py`)."""

from april.util.registry import Registry

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
