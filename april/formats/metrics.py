"""The lines of metrics.jsonl: one for every trained step, and one for every evaluation, in the order of their ends.

    {"step": 3, "time": 1763640042.1, "reward": 0.61, ...}
    {"step": 3, "time": 1763640043.9, "evaluation": {"accuracy": 0.64, "prompts": 500, ...}}

An evaluation's `step` is that of the policy, 0 before the first. It may end behind the lines of later steps. Of two of
one step the later one counts.
"""

from typing import Any


def line_of_evaluation(result: dict[str, Any]) -> dict[str, Any]:
    """`result`: `step`, `time` (Unix seconds) and what was found."""
    found = {key: value for key, value in result.items() if key not in ("step", "time")}
    return {"step": result["step"], "time": result["time"], "evaluation": found}


def is_step(line: dict[str, Any]) -> bool:
    return "evaluation" not in line
