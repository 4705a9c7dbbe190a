"""The data of the run page: what the dashboard answers to its browser, and what a report carries in its file.

Each function returns what becomes JSON with NaN as null.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from april.config.stored import held_out_score
from april.observe.dashboard.steps import Steps
from april.observe.report.facts import facts, resumes, token_totals
from april.observe.report.run_folder import RunFolder, dig, shown_config
from april.observe.report.timeline import (
    RESOLUTION,
    add_idle_spans,
    drawn_steps,
    drawn_tracks,
    merge_spans,
    worker_tracks,
)

# --- figures of a run -------------------------------------------------------------------------------------------------


def describe(run: RunFolder, steps: Steps) -> dict[str, Any]:
    """The run's facts, configuration, token ledger, evaluations, resumes, alarms, and response lengths; `run.records`
    may be what `Steps.records` has."""
    ledger, changes = token_totals(run), run.resumes
    alarms = dict(steps.alarms)
    return {
        "summary": run.summary,
        "facts": facts(run),
        "config": run.config_text,
        "ledger": ledger
        and {
            "generated": ledger.generated,
            "closed": ledger.closed,
            "states": ledger.by_state,
            "outside": ledger.outside_ledger,
            "with_gradient": dig(run.summary, "gradient", "tokens"),
        },
        "evaluation": last_evaluation(run),
        "held_out": held_out_curves(run),
        "resumes": [resume["step"] for resume in changes],
        "resumed": resumes(run),
        "alarms": {"steps": len(alarms), "step": max(alarms), "raised": alarms[max(alarms)]} if alarms else None,
        "lengths": {which: density for which in ("created", "trained") if (density := lengths(run, steps, which))},
        "columns": steps.figure_names,
    }


def last_evaluation(run: RunFolder) -> dict[str, Any] | None:
    """`step`, `measure` (accuracy or reward), `value` and `not_evaluated` of the newest held-out evaluation, and the
    value of each named set in `sets`."""
    if not run.evaluation:
        return None
    point = run.evaluation[-1]
    sets = {name: held_out_score(scores)[1] for name, scores in (point.get("sets") or {}).items()}
    missing = sum(scores.get("not_evaluated") or 0 for scores in (point.get("sets") or {"": point}).values())
    measure, value = held_out_score(point)
    return {"step": point.get("step") or 0, "measure": measure, "value": value, "not_evaluated": missing, "sets": sets}


def held_out_curves(run: RunFolder) -> list[dict[str, Any]]:
    """The accuracies, or rewards, to be joined by a line each: of named sets one curve each, otherwise one for each set
    of prompts."""
    named = run.named_evaluations
    unnamed = {f"held-out{f', set {n}' if n > 1 else ''}": points for n, points in enumerate(run.evaluation_sets, 1)}
    return [
        {
            "label": label,
            "steps": [point.get("step") or 0 for point in points],
            "values": [held_out_score(point)[1] for point in points],
        }
        for label, points in (named or unnamed).items()
    ]


# --- response lengths -------------------------------------------------------------------------------------------------

BINS_PER_DOUBLING = 4
"""Histogram bins per doubling of the response length."""


def lengths(run: RunFolder, steps: Steps, which: str) -> dict[str, Any] | None:
    """Distribution of the `created` or `trained` responses' lengths over all steps: `edges` [n + 1], the logarithms to
    base 2 of tokens, and `shares` [n + 1] of samples in a quarter of a doubling; the last is 0. None without any."""
    found = length_density(steps.histogram(f"lengths.{which}_histogram"))
    if found is None:
        return None
    edges, density = found
    shares = np.append(density / BINS_PER_DOUBLING, 0.0)
    return {"edges": np.log2(edges), "shares": shares, "mean": dig(run.summary, "lengths", which, "mean")}


def length_density(counts: dict[int, float]) -> tuple[np.ndarray, np.ndarray] | None:
    """(bin edges in tokens [n + 1], share of samples per doubling of length [n]) of the samples counted by bin.

    A length k covers [k, k + 1), so that bins of few lengths have the right height.
    """
    total = sum(counts.values())
    if not total:
        return None
    starts = [i for i in range(max(counts) + 1) if first_length(i) < first_length(i + 1)]
    ends = [*starts[1:], max(counts) + 1]
    edges = np.array([first_length(i) for i in [*starts, ends[-1]]])
    shares = np.array([sum(counts.get(i, 0) for i in range(a, b)) for a, b in zip(starts, ends, strict=True)]) / total
    return edges, shares / np.diff(np.log2(edges))


def first_length(index: int) -> int:
    """The smallest length of histogram bin `index`, which counts [2^(index/4), 2^((index+1)/4)) tokens."""
    return math.ceil(2 ** (index / BINS_PER_DOUBLING) - 1e-9)


# --- tables of steps --------------------------------------------------------------------------------------------------

MAX_ROWS = 1000
"""Most rows of a report's table of steps; of more steps it has means over equal numbers of them."""
NEWEST_OF_PART = ("step", "time")
"""Columns of which a part of several steps has the last value instead of the mean."""


def table(steps: Steps, columns: str | None = None, after: int = 0) -> dict[str, Any]:
    """All or the named columns of the steps after `after`, in order of the steps. `columns`: names separated by commas;
    one that ends with `*` stands for all columns that begin so."""
    names = steps.figure_names
    if columns is not None:
        names = [
            name
            for asked in columns.split(",")
            for name in ([name for name in names if name.startswith(asked[:-1])] if asked.endswith("*") else [asked])
        ]
    return {name: compact(column) for name, column in steps.table(["step", *names], after).items()}


def thinned(columns: dict[str, Any]) -> dict[str, Any]:
    """The table with at most MAX_ROWS rows, each of the same number of steps (the last of fewer), with the number of
    steps of a row as `steps_a_row`."""
    count = len(columns["step"])
    steps_a_row = max(1, math.ceil(count / MAX_ROWS))
    starts = np.arange(0, count, steps_a_row)
    newest = np.minimum(starts + steps_a_row, count) - 1

    def mean(column: np.ndarray) -> np.ndarray | None:
        known = ~np.isnan(column)
        sums, counts = (np.add.reduceat(part, starts, dtype=float) for part in (np.where(known, column, 0), known))
        return compact(np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0))

    if steps_a_row == 1:
        rows = columns
    else:
        rows = {name: column[newest] if name in NEWEST_OF_PART else mean(column) for name, column in columns.items()}
    return rows | {"steps_a_row": steps_a_row}


def compact(column: np.ndarray | None) -> np.ndarray | None:
    """The column as float32 where its values are below 1e6, to shorten the JSON."""
    if column is None or (np.abs(column) >= 1e6).any():
        return column
    return column.astype(np.float32)


# --- timeline of some steps -------------------------------------------------------------------------------------------

MAX_LINES = 200
"""Most lines of metrics.jsonl that are read for one picture; from more lines an evenly spaced selection is read."""
STEPS_AT_FIRST = 8
"""Number of steps in the timeline's default window: the last ones of the run."""


def timeline_window(
    steps: Steps, begin_s: float | None = None, end_s: float | None = None, max_workers: int | None = None
) -> dict[str, Any]:
    """Timeline of workers (all of them or the first ones) and learner between two times (Unix seconds), small enough
    to draw. What idle workers wait for is left out where only a selection of the lines is read.

    By default it covers the last STEPS_AT_FIRST steps.
    """
    columns = steps.table(["step", "time", "learner.train_s"])
    zeros = np.zeros_like(columns["step"])
    filled = [np.nan_to_num(zeros if column is None else column).tolist() for column in columns.values()]
    ended = [(time_s, int(step), train_s) for step, time_s, train_s in zip(*filled, strict=True) if time_s]
    if not ended:
        return {"begin": 0, "end": 0, "lanes": [], "workers": 0, "learner": [], "steps": [], "whole": True}
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
    spans = [(max(begin_s, time_s - train_s), time_s) for time_s, _, train_s in inside if train_s]
    learner = merge_spans(spans, (end_s - begin_s) / RESOLUTION)
    tracks, whole = worker_tracks(events, begin_s, end_s, RESOLUTION), len(inside) <= MAX_LINES
    if whole:
        add_idle_spans(tracks, learner, begin_s, end_s)
    return {
        "begin": begin_s,
        "end": end_s,
        "lanes": drawn_tracks(tracks[:max_workers]),
        "workers": len(tracks),
        "learner": learner,
        "steps": drawn_steps([(step, time_s) for time_s, step, _ in inside], end_s - begin_s),
        "whole": whole,
    }


def read_config_text(path: Path) -> str:
    """The run's configuration, without its secrets; "" if it cannot be read."""
    try:
        return shown_config(tomllib.loads((path / "config.toml").read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return ""
