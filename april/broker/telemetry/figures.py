"""A run's figures as others take them: a flat name and a number each."""

from typing import Any

LEFT_OUT = ("step", "time", "lanes", "lengths", "alarms")
"""of a step's record: its place, and what is no scalar"""
NAMED_BY_STEP = "version_share_"
"""of the learner's figures: each step would have names of its own; the staleness by age says the same"""


def of_step(record: dict[str, Any]) -> dict[str, float]:
    """Those of a line of metrics.jsonl, and 1 for each alarm that is raised."""
    figures = scalars({name: value for name, value in record.items() if name not in LEFT_OUT})
    return figures | {f"alarms/{alarm['name']}": 1.0 for alarm in record.get("alarms", ())}


SCORES = ("accuracy", "mean_at_k", "pass_at_k")


def of_evaluation(result: dict[str, Any]) -> dict[str, float]:
    """Those of the first set, and of several those of each, as sets/NAME."""
    sets = {name: {score: found[score] for score in SCORES} for name, found in result.get("sets", {}).items()}
    return scalars({"evaluation": {score: result[score] for score in SCORES} | {"sets": sets}})


def scalars(figures: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number in nested mappings but those named by step, the keys joined by slashes."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not name.startswith(NAMED_BY_STEP):
            found[f"{prefix}{name}"] = float(value)
    return found
