"""Metrics of a run: what is recorded, the sinks that receive it (`sink.py`) and the alarms that watch it
(`alarm.py`)."""

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
        "nothing_trained": "april.broker.telemetry.nothing_trained:NothingTrainedAlarm",
        "engine_gap": "april.broker.telemetry.engine_gap:EngineGapAlarm",
        "slow_part": "april.broker.telemetry.slow_part:SlowPartAlarm",
        "wrong_weights": "april.broker.telemetry.wrong_weights:WrongWeightsAlarm",
        "policy_gap": "april.broker.telemetry.policy_alarms:PolicyGapAlarm",
        "effective_samples": "april.broker.telemetry.policy_alarms:EffectiveSamplesAlarm",
        "length_bias": "april.broker.telemetry.policy_alarms:LengthBiasAlarm",
        "looping": "april.broker.telemetry.policy_alarms:LoopingAlarm",
        "entropy_collapse": "april.broker.telemetry.policy_alarms:EntropyCollapseAlarm",
        "staleness_bound": "april.broker.telemetry.operation_alarms:StalenessAlarm",
        "starved_engines": "april.broker.telemetry.operation_alarms:StarvedEnginesAlarm",
        "saturated_engines": "april.broker.telemetry.operation_alarms:SaturatedEnginesAlarm",
        "disk_filling": "april.broker.telemetry.operation_alarms:DiskFillingAlarm",
    },
    base="april.broker.telemetry.alarm:Alarm",
)
