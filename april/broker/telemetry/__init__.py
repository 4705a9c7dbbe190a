"""What is counted of a run, and where the figures go. `sink.py` says what a metrics sink is,
`alarm.py` what an alarm."""

from april.registry import Registry

SINKS = Registry(
    "operations.sinks",
    "metrics sink",
    {
        "tensorboard": "april.broker.telemetry.tensorboard:TensorBoard",
        "wandb": "april.broker.telemetry.wandb:WeightsAndBiases",
        "mlflow": "april.broker.telemetry.mlflow:MLflow",
        "trackio": "april.broker.telemetry.trackio:Trackio",
        "swanlab": "april.broker.telemetry.swanlab:SwanLab",
    },
    base="april.broker.telemetry.sink:Sink",
)
ALARMS = Registry(
    "operations.alarms",
    "alarm",
    {
        "nothing_trained": "april.broker.telemetry.nothing_trained:NothingTrained",
        "engine_gap": "april.broker.telemetry.engine_gap:EngineGap",
        "slow_part": "april.broker.telemetry.slow_part:SlowPart",
        "wrong_weights": "april.broker.telemetry.wrong_weights:WrongWeights",
        "policy_gap": "april.broker.telemetry.policy_alarms:PolicyGap",
        "effective_samples": "april.broker.telemetry.policy_alarms:EffectiveSamples",
        "length_bias": "april.broker.telemetry.policy_alarms:LengthBias",
        "looping": "april.broker.telemetry.policy_alarms:Looping",
        "entropy_collapse": "april.broker.telemetry.policy_alarms:EntropyCollapse",
        "staleness_bound": "april.broker.telemetry.operation_alarms:StalenessBound",
        "starved_engines": "april.broker.telemetry.operation_alarms:StarvedEngines",
        "saturated_engines": "april.broker.telemetry.operation_alarms:SaturatedEngines",
        "disk_filling": "april.broker.telemetry.operation_alarms:DiskFilling",
    },
    base="april.broker.telemetry.alarm:Alarm",
)
