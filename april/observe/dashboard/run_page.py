"""The data of the run page: what the dashboard answers to its browser, and what a report carries in its file.

Each function returns what becomes JSON with NaN as null.
"""

import math
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from april.config.stored import held_out_score
from april.observe.dashboard.steps import Steps
from april.observe.report.facts import facts, resumes, token_totals
from april.observe.report.run_folder import RunFolder, dig, shown_config
from april.observe.report.timeline import (
    RESOLUTION,
    SHARE_INTERVALS,
    add_idle_spans,
    drawn_steps,
    drawn_tracks,
    learner_waits,
    merge_spans,
    natural_key,
    worker_tracks,
)

# --- figures of a run -------------------------------------------------------------------------------------------------


def describe(run: RunFolder, steps: Steps) -> dict[str, Any]:
    """The run's facts, configuration, token ledger, evaluations, resumes, alarms, and response lengths. The records of
    `run` may lack all keys but those that `Steps.records` fills in."""
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
    """The newest held-out evaluation: its `step`, `measure` (accuracy or reward), `value`, the number of prompts
    `not_evaluated`, and in `sets` the value of each named set. None without an evaluation."""
    if not run.evaluation:
        return None
    point = run.evaluation[-1]
    sets = {name: held_out_score(scores)[1] for name, scores in (point.get("sets") or {}).items()}
    missing = sum(scores.get("not_evaluated") or 0 for scores in (point.get("sets") or {"": point}).values())
    measure, value = held_out_score(point)
    return {"step": point.get("step") or 0, "measure": measure, "value": value, "not_evaluated": missing, "sets": sets}


def held_out_curves(run: RunFolder) -> list[dict[str, Any]]:
    """Curves of the held-out accuracies, or rewards: one for each named set; without names, one for each set of
    prompts. A curve has a `label`, and the lists `steps` and `values`, with one entry for each evaluation."""
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
    """Distribution of the response lengths over all steps; None without responses. `which`: "created" (all responses
    that were generated) or "trained".

    `edges` [n + 1]: bin edges, as logarithms to base 2 of tokens; `shares` [n + 1]: of each bin the share of responses
    per quarter of a doubling, followed by a 0; `mean`: mean length in tokens.
    """
    found = length_density(steps.histogram(f"lengths.{which}_histogram"))
    if found is None:
        return None
    edges, density = found
    shares = np.append(density / BINS_PER_DOUBLING, 0.0)
    return {"edges": np.log2(edges), "shares": shares, "mean": dig(run.summary, "lengths", which, "mean")}


def length_density(counts: dict[int, float]) -> tuple[np.ndarray, np.ndarray] | None:
    """(bin edges in tokens [n + 1], share of samples per doubling of length [n]); None without samples. `counts`:
    number of samples by index of the histogram's bins (`first_length`).

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
"""Maximum number of rows of a report's table; of more steps, each row has means over the same number of steps."""
NEWEST_OF_PART = ("step", "time")
"""Columns that are not averaged where one row stands for several steps: they have the value of the last of these
steps."""


def table(steps: Steps, columns: str | None = None, after: int = 0) -> dict[str, Any]:
    """All or the named columns of the steps after `after`, in order of the steps. `columns`: names separated by commas;
    NAME* stands for all columns that begin with NAME."""
    names = steps.figure_names
    if columns is not None:
        names = [
            name
            for asked in columns.split(",")
            for name in ([name for name in names if name.startswith(asked[:-1])] if asked.endswith("*") else [asked])
        ]
    return {name: compact(column) for name, column in steps.table(["step", *names], after).items()}


def thinned(columns: dict[str, Any]) -> dict[str, Any]:
    """The table `columns` (of one row per step) with at most MAX_ROWS rows. Each row stands for the same number of
    steps, the last one for fewer if they do not divide evenly; `steps_a_row` is that number."""
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
    """The column as float32, to shorten the JSON; unchanged if one of its values is 1e6 or more in size, and None if it
    is None."""
    if column is None or (np.abs(column) >= 1e6).any():
        return column
    return column.astype(np.float32)


# --- timeline of some steps -------------------------------------------------------------------------------------------

MAX_LINES = 200
"""Maximum number of lines of metrics.jsonl that are read for one picture; from more lines an evenly spaced selection is
read."""
STEPS_AT_FIRST = 8
"""Number of steps in the timeline's default window: the last ones of the run."""
SHORTEST_WINDOW_S = 1e-3
LEARNER = ""
"""Key of the learner's lane among the workers' lanes: the empty text, which is no worker's name."""


def timeline_window(
    steps: Steps, begin_s: float | None = None, end_s: float | None = None, max_workers: int | None = None
) -> dict[str, Any]:
    """Timeline between two times (Unix seconds) of the learner and of the workers (all, or the first `max_workers`),
    small enough to draw. In a window of up to MAX_LINES steps it has the spans of each worker. A window of more steps
    is divided into SHARE_INTERVALS intervals; for each of them it has the shares of time by activity in one step of the
    interval.

    If `begin_s` or `end_s` is None, it covers the last STEPS_AT_FIRST steps. Its `origin` and `last` are the beginning
    and the end of the run.
    """
    columns = steps.table(["step", "time", "learner.train_s"])
    zeros = np.zeros_like(columns["step"])
    filled = [np.nan_to_num(zeros if column is None else column).tolist() for column in columns.values()]
    ended = [(time_s, int(step), train_s) for step, time_s, train_s in zip(*filled, strict=True) if time_s]
    if not ended:
        return {"begin": 0, "end": 0, "origin": 0, "last": 0, "lanes": [], "workers": 0, "learner": None, "steps": []}
    first_s, first_step, first_train_s = ended[0]
    origin_s = min([event["start"] for event in worker_events(steps.lines([first_step]))] + [first_s - first_train_s])
    if begin_s is None or end_s is None:
        begin_s = ended[-STEPS_AT_FIRST - 1][0] if len(ended) > STEPS_AT_FIRST else origin_s
        end_s = ended[-1][0]
    begin_s = max(begin_s, origin_s)
    end_s = max(end_s, begin_s + SHORTEST_WINDOW_S)
    inside = [step for step in ended if begin_s <= step[0] <= end_s]
    if len(inside) > MAX_LINES:
        learner, lanes = sampled_shares(steps, ended, begin_s, end_s)
    else:
        events = worker_events(steps.between(begin_s, end_s, MAX_LINES))
        spans = [(max(begin_s, time_s - train_s), time_s) for time_s, _, train_s in inside if train_s]
        trained = merge_spans(spans, (end_s - begin_s) / RESOLUTION)
        tracks = worker_tracks(events, begin_s, end_s, RESOLUTION)
        add_idle_spans(tracks, trained, begin_s, end_s)
        learner = {"spans": {"train": trained, **learner_waits(tracks, trained, begin_s, end_s)}}
        lanes = drawn_tracks(tracks)
    return {
        "begin": begin_s,
        "end": end_s,
        "origin": origin_s,
        "last": ended[-1][0],
        "lanes": lanes[:max_workers],
        "workers": len(lanes),
        "learner": learner,
        "steps": drawn_steps([(step, time_s) for time_s, step, _ in inside], end_s - begin_s),
    }


def worker_events(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    events = [event for line in lines for event in line.get("timeline") or []]
    return [event for event in events if event.get("worker") and event.get("start") is not None]


Shares = dict[str, np.ndarray]
"""Shares of time, by kind of activity (span): for each kind float64 [SHARE_INTERVALS], the share of each interval."""


def sampled_shares(
    steps: Steps, ended: list[tuple[float, int, float]], begin_s: float, end_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(lane of the learner, lanes of the workers) for a window of many steps. The window is divided into
    SHARE_INTERVALS intervals. A lane has, for each interval, the shares of time by activity in the step at the middle
    of it. `ended`: (end in Unix seconds, number, seconds of training) of each step of the run, in order. `begin_s`,
    `end_s`: the window, Unix seconds."""
    middles_s = begin_s + (np.arange(SHARE_INTERVALS) + 0.5) * (end_s - begin_s) / SHARE_INTERVALS
    chosen = np.minimum(np.searchsorted([time_s for time_s, _, _ in ended], middles_s), len(ended) - 1)
    shares: dict[str, Shares] = {}
    for column, at in enumerate(chosen.tolist()):
        time_s, step, train_s = ended[at]
        start_s = ended[at - 1][0] if at else time_s - (train_s or 1.0)
        if start_s >= time_s:
            continue
        # What goes on at the end of a step is in the line of the next.
        events = worker_events(steps.lines([step, *(number for _, number, _ in ended[at + 1 : at + 2])]))
        tracks, trained = worker_tracks(events, start_s, time_s, math.inf), [(max(start_s, time_s - train_s), time_s)]
        add_idle_spans(tracks, trained, start_s, time_s)
        spans_by_lane = {track.worker: track.spans for track in tracks}
        spans_by_lane[LEARNER] = {"train": trained, **learner_waits(tracks, trained, start_s, time_s)}
        for lane, spans_by_kind in spans_by_lane.items():
            for kind, spans in spans_by_kind.items():
                of_lane = shares.setdefault(lane, {}).setdefault(kind, np.zeros(SHARE_INTERVALS))
                of_lane[column] = sum(end - begin for begin, end in spans) / (time_s - start_s)
    learner = {"shares": shares.pop(LEARNER, {})}
    workers = sorted(shares, key=natural_key)
    return learner, [{"worker": worker, "spans": {}, "instants": {}, "shares": shares[worker]} for worker in workers]


# --- logs -------------------------------------------------------------------------------------------------------------

LOG_BYTES = 128 << 10
"""Maximum number of bytes of a log that are shown: the last ones."""


def logs(path: Path, name: str = "") -> dict[str, Any]:
    """Without a `name`: names of the logs in a run folder, as `files`. With one also the last lines of that log, as
    `text`, and the number of bytes before them, as `left_out`. Raises LookupError if there is no log of that name."""
    files = {file.name: file for file in sorted((path / "logs").glob("*.log")) if file.is_file()}
    if not name:
        return {"files": list(files)}
    if name not in files:
        raise LookupError(f"log {name!r} is not here; there are {', '.join(files) or 'none'}")
    with files[name].open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(begin)
        data = file.read(LOG_BYTES)
    if begin:
        cut = data.find(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    return {"files": list(files), "text": data.decode(errors="replace"), "left_out": begin}


def read_config_text(path: Path) -> str:
    """The run's configuration, without its secrets; "" if it cannot be read."""
    try:
        return shown_config(tomllib.loads((path / "config.toml").read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return ""
