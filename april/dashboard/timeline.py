"""What workers and learner did in a stretch of time, small enough to draw."""

from typing import Any

import numpy as np

from april.dashboard.steps import Steps
from april.report.lanes import make_lanes, merge_spans, thin

RESOLUTION = 1500
"""parts of the stretch; what is nearer to each other is drawn as one"""
MARK_PARTS = 40
"""of them that the name of a step takes"""
MOST_LINES = 200
"""of metrics.jsonl that are read for one picture; of more, as many evenly spread"""
STEPS_AT_FIRST = 8


def timeline(steps: Steps, begin_s: float | None, end_s: float | None) -> dict[str, Any]:
    """Lanes between two times (Unix seconds), by default of the last few steps."""
    table = steps.table(["step", "time", "learner.train_s"])
    nothing = np.zeros_like(table["step"])
    columns = [np.nan_to_num(nothing if column is None else column).tolist() for column in table.values()]
    ended = [(at, step, train_s) for step, at, train_s in zip(*columns, strict=True) if at]
    if not ended:
        return {"begin": 0, "end": 0, "lanes": [], "learner": [], "steps": [], "whole": True}
    if begin_s is None or end_s is None:
        begin_s = ended[-STEPS_AT_FIRST - 1][0] if len(ended) > STEPS_AT_FIRST else None
        end_s = ended[-1][0]
    inside = [one for one in ended if (begin_s is None or one[0] >= begin_s) and one[0] <= end_s]
    entries = [
        lane
        for line in steps.between(begin_s or 0.0, end_s, MOST_LINES)
        for lane in line.get("lanes") or []
        if lane.get("worker") and lane.get("start") is not None
    ]
    if begin_s is None:
        begin_s = min([lane["start"] for lane in entries] + [ended[0][0] - (ended[0][2] or 1.0)])
    smallest_s = (end_s - begin_s) / RESOLUTION
    marked = set(thin([at for at, _, _ in inside], MARK_PARTS * smallest_s))
    spans = [(max(begin_s, at - train_s), at) for at, _, train_s in inside if train_s]
    return {
        "begin": begin_s,
        "end": end_s,
        "lanes": [
            {"worker": lane.worker, "spans": lane.spans, "instants": lane.instants}
            for lane in make_lanes(entries, begin_s, end_s, RESOLUTION)
        ],
        "learner": merge_spans(spans, smallest_s),
        "steps": [[at, step] for at, step, _ in inside if at in marked],
        "whole": len(inside) <= MOST_LINES,
    }
