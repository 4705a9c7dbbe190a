"""Metrics of a run: what is recorded, the sinks that receive it (`sinks.py`) and the alarms that watch it
(`alarm.py`)."""

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
ALARMS = Registry(
    "operations.alarms",
    "alarm",
    {
        "nothing_trained": "april.broker.telemetry.alarms:NothingTrainedAlarm",
        "engine_gap": "april.broker.telemetry.alarms:EngineGapAlarm",
        "slow_part": "april.broker.telemetry.alarms:SlowPartAlarm",
        "wrong_weights": "april.broker.telemetry.alarms:WrongWeightsAlarm",
        "policy_gap": "april.broker.telemetry.alarms:PolicyGapAlarm",
        "effective_samples": "april.broker.telemetry.alarms:EffectiveSamplesAlarm",
        "length_bias": "april.broker.telemetry.alarms:LengthBiasAlarm",
        "looping": "april.broker.telemetry.alarms:LoopingAlarm",
        "entropy_collapse": "april.broker.telemetry.alarms:EntropyCollapseAlarm",
        "staleness_bound": "april.broker.telemetry.alarms:StalenessAlarm",
        "starved_engines": "april.broker.telemetry.alarms:StarvedEnginesAlarm",
        "saturated_engines": "april.broker.telemetry.alarms:SaturatedEnginesAlarm",
        "disk_filling": "april.broker.telemetry.alarms:DiskFillingAlarm",
    },
    base="april.broker.telemetry.alarm:Alarm",
)
