"""Flattens records of steps and evaluations to names and numbers, as metrics sinks take them."""

from typing import Any

LEFT_OUT = ("step", "time", "lanes", "lengths", "alarms")
"""Keys of a step's record that are no metrics of a sink: its step and time, and what is no scalar."""
NAMED_BY_STEP = "version_share_"
"""Prefix of learner metrics that are left out: each step would add names. Staleness by age shows the same."""


def of_step(record: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step's record in metrics.jsonl, and 1 for each alarm that it raises."""
    figures = scalars({name: value for name, value in record.items() if name not in LEFT_OUT})
    return figures | {f"alarms/{alarm['name']}": 1.0 for alarm in record.get("alarms", ())}


SCORES = ("accuracy", "mean_at_k", "pass_at_k")


def of_evaluation(result: dict[str, Any]) -> dict[str, float]:
    """Scores of an evaluation: those of its first set, and with several sets those of each as sets/NAME."""
    sets = {name: {score: found[score] for score in SCORES} for name, found in result.get("sets", {}).items()}
    return scalars({"evaluation": {score: result[score] for score in SCORES} | {"sets": sets}})


def scalars(figures: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number in nested mappings except those named by step; nested keys are joined by slashes."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not name.startswith(NAMED_BY_STEP):
            found[f"{prefix}{name}"] = float(value)
    return found
