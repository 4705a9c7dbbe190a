"""What is counted of a run, and where the figures go. `sink.py` says what a metrics sink is,
`alarm.py` what an alarm."""

from april.registry import Registry

SINKS = Registry(
    "operations.sinks",
    "metrics sink",
    {"tensorboard": "april.broker.telemetry.tensorboard:TensorBoard"},
    base="april.broker.telemetry.sink:Sink",
)
ALARMS = Registry(
    "operations.alarms",
    "alarm",
    {
        "nothing_trained": "april.broker.telemetry.nothing_trained:NothingTrained",
        "wrong_weights": "april.broker.telemetry.wrong_weights:WrongWeights",
    },
    base="april.broker.telemetry.alarm:Alarm",
)
