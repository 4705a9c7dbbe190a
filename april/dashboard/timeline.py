"""The timeline of workers and learner in a window of time, small enough to draw."""

from typing import Any

import numpy as np

from april.dashboard.steps import Steps
from april.report.lanes import merge_spans, thin_out, worker_tracks

RESOLUTION = 1500
"""Spans and marks closer together than the window's length divided by this are merged."""
MARK_WIDTH = 40
"""Width of a step's label, in units of the window's length divided by RESOLUTION."""
MAX_LINES = 200
"""Lines of metrics.jsonl that are read for one picture; of more, an even selection."""
STEPS_AT_FIRST = 8
"""Steps in the default window."""


def timeline(steps: Steps, begin_s: float | None, end_s: float | None) -> dict[str, Any]:
    """Timeline between two times (Unix seconds), by default of the last STEPS_AT_FIRST steps."""
    table = steps.table(["step", "time", "learner.train_s"])
    zeros = np.zeros_like(table["step"])
    columns = [np.nan_to_num(zeros if column is None else column).tolist() for column in table.values()]
    ended = [(time_s, step, train_s) for step, time_s, train_s in zip(*columns, strict=True) if time_s]
    if not ended:
        return {"begin": 0, "end": 0, "lanes": [], "learner": [], "steps": [], "whole": True}
    if begin_s is None or end_s is None:
        begin_s = ended[-STEPS_AT_FIRST - 1][0] if len(ended) > STEPS_AT_FIRST else None
        end_s = ended[-1][0]
    inside = [step for step in ended if (begin_s is None or step[0] >= begin_s) and step[0] <= end_s]
    events = [
        event
        for line in steps.between(begin_s or 0.0, end_s, MAX_LINES)
        for event in line.get("lanes") or []
        if event.get("worker") and event.get("start") is not None
    ]
    if begin_s is None:
        begin_s = min([event["start"] for event in events] + [ended[0][0] - (ended[0][2] or 1.0)])
    smallest_s = (end_s - begin_s) / RESOLUTION
    marked = set(thin_out([time_s for time_s, _, _ in inside], MARK_WIDTH * smallest_s))
    spans = [(max(begin_s, time_s - train_s), time_s) for time_s, _, train_s in inside if train_s]
    return {
        "begin": begin_s,
        "end": end_s,
        "lanes": [
            {"worker": track.worker, "spans": track.spans, "instants": track.instants}
            for track in worker_tracks(events, begin_s, end_s, RESOLUTION)
        ],
        "learner": merge_spans(spans, smallest_s),
        "steps": [[time_s, step] for time_s, step, _ in inside if time_s in marked],
        "whole": len(inside) <= MAX_LINES,
    }
