"""What is counted of a run, and where the figures go. `sink.py` says what a metrics sink is."""

from april.registry import Registry

SINKS = Registry(
    "operations.sinks",
    "metrics sink",
    {"tensorboard": "april.broker.telemetry.tensorboard:TensorBoard"},
    base="april.broker.telemetry.sink:Sink",
)
