"""Lines of metrics.jsonl: one per trained step and one per evaluation, in the order in which they finished.

    {"step": 3, "time": 1763640042.1, "reward": 0.61, ...}
    {"step": 3, "time": 1763640043.9, "evaluation": {"accuracy": 0.64, "prompts": 500, ...}}

An evaluation's `step` is the step of the evaluated policy, 0 for the initial one. Its line may follow lines of later
steps. If a step has two evaluations, the later line counts.
"""

from typing import Any


def line_of_evaluation(result: dict[str, Any]) -> dict[str, Any]:
    """The line of an evaluation. `result`: `step`, `time` (Unix time, seconds) and the figures."""
    figures = {key: value for key, value in result.items() if key not in ("step", "time")}
    return {"step": result["step"], "time": result["time"], "evaluation": figures}


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line is a trained step, not an evaluation."""
    return "evaluation" not in line
