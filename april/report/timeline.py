"""The report's pictures of worker timelines: what each worker did or waited for; pauses between resumes are cut out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from april.report.drawing import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    RED,
    VIOLET,
    WAITING,
    draw_boxes,
    new_figure,
    themed,
    to_svg,
)
from april.report.facts import duration
from april.report.lanes import Span, WorkerTrack, busy_share, intersect, merge_spans, subtract, worker_tracks
from april.report.run_folder import RunFolder, dig
from april.report.series import MANY_STEPS, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_WORKERS = 24
ZOOM_STEPS = 10
SPAN_RESOLUTION = 1000
"""Spans and marks closer together than this fraction of the drawn time are merged."""
SHARE_INTERVALS = 120
"""Intervals of a long run, drawn by the share of time that each activity took."""
PAUSE_S = 1.0
"""Seconds to which a pause between two starts of the run is shortened."""
SHORTEST_WAIT_S = 1e-3
BARS = [
    ("generate", "generating", BLUE, 0.26),
    ("weights", "weight update", ORANGE, 0.38),
    ("wait-others", "waits: others generate", WAITING["wait-others"], 0.2),
    ("wait-learner", "waits: the learner trains", WAITING["wait-learner"], 0.2),
    ("wait-weights", "waits: weights are sent", WAITING["wait-weights"], 0.2),
    ("wait-else", "waits: broker, scores", WAITING["wait-else"], 0.2),
]
"""(kind, label, color, half height of the bar) of each activity."""
LEGEND_ROW_IN = 0.19
WAITS = [kind for kind, *_ in BARS if kind.startswith("wait")]


@dataclass
class Timeline:
    """Events of a run on a clock in seconds that starts with the first event and leaves out pauses."""

    events: list[dict]
    """Worker events, with `start` and `end` on this clock."""
    steps: list[tuple[int, float]]
    """(step, time at which it was recorded)."""
    learner: list[Span]
    """Spans in which the learner trained."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """(time, length) of each pause that was cut out."""

    @property
    def end_s(self) -> float:
        return max(1e-3, *(event["end"] for event in self.events))


def timeline_of(run: RunFolder) -> Timeline:
    events = [event | {"end": max(event["start"], event.get("end") or 0)} for event in run.worker_events]
    steps = [
        (step["step"], step["time"], dig(step, "learner", "train_s") or 0.0) for step in run.steps if "time" in step
    ]
    steps = [step for step in steps if step[1] is not None]
    ends = sorted([*(event["end"] for event in events), *(time for _, time, _ in steps)])
    starts = sorted([*(event["start"] for event in events), *(time - trained_s for _, time, trained_s in steps)])
    cuts: list[Span] = []
    for resume in run.resumes:
        before = [end for end in ends if end <= resume["time"]]
        after = [start for start in starts if start >= resume["time"]]
        if before and after and after[0] - before[-1] > 2 * PAUSE_S:
            cuts.append((before[-1], after[0]))
    to_clock = partial(on_clock, cuts=cuts, origin=starts[0])
    return Timeline(
        [event | {"start": to_clock(event["start"]), "end": to_clock(event["end"])} for event in events],
        [(step, to_clock(time)) for step, time, _ in steps],
        merge_spans([(to_clock(time - trained_s), to_clock(time)) for _, time, trained_s in steps], 0.0),
        [(to_clock(begin), end - begin) for begin, end in cuts],
    )


def on_clock(time: float, cuts: list[Span], origin: float) -> float:
    """Seconds since `origin`, where each cut counts as at most PAUSE_S."""
    cut = sum(min(time, end) - begin - min(PAUSE_S, min(time, end) - begin) for begin, end in cuts if time > begin)
    return time - origin - cut


def add_idle_spans(tracks: list[WorkerTrack], learner: list[Span], begin_s: float, end_s: float) -> None:
    """Add spans of idle time to each track, by what the worker waited for: while others generate, for their responses;
    otherwise, while the learner trains, for the learner; before a weight update, for weights; else for the broker or
    for scores."""
    generating = merge_spans([span for track in tracks for span in track.spans.get("generate", [])], 0.0)
    for track in tracks:
        busy = merge_spans([span for kind in ("generate", "weights") for span in track.spans.get(kind, [])], 0.0)
        idle = subtract(subtract([(begin_s, end_s)], busy), absent_spans(track, begin_s, end_s))
        track.spans["wait-others"] = intersect(idle, generating)
        idle = subtract(idle, generating)
        track.spans["wait-learner"] = intersect(idle, learner)
        idle = subtract(idle, learner)
        updates = {start for start, _ in track.spans.get("weights", [])}
        track.spans["wait-weights"] = [span for span in idle if span[1] in updates]
        track.spans["wait-else"] = [span for span in idle if span[1] not in updates]
        for kind in WAITS:
            track.spans[kind] = [span for span in track.spans[kind] if span[1] - span[0] > SHORTEST_WAIT_S]


def absent_spans(track: WorkerTrack, begin_s: float, end_s: float) -> list[Span]:
    """Spans without the worker: before it first joined, and from each loss until it joined or acted again."""
    joined = sorted([*track.instants.get("joined", []), *(span[0] for spans in track.spans.values() for span in spans)])
    away = [(begin_s, joined[0] if joined else end_s)]
    for lost in track.instants.get("lost", []):
        away.append((lost, next((time for time in joined if time > lost), end_s)))
    return merge_spans([span for span in away if span[1] > span[0]], 0.0)


def waiting(run: RunFolder) -> str:
    """Shares of the workers' time by activity, in one sentence; "" without worker events."""
    if not run.worker_events:
        return ""
    timeline = timeline_of(run)
    tracks = worker_tracks(timeline.events, 0.0, timeline.end_s, math.inf)
    add_idle_spans(tracks, timeline.learner, 0.0, timeline.end_s)
    seconds_by_kind = {kind: sum(b - a for track in tracks for a, b in track.spans.get(kind, [])) for kind, *_ in BARS}
    total = sum(seconds_by_kind.values())
    shares = [
        f"{seconds_by_kind[kind] / total:.0%} {label}"
        for kind, label, *_ in BARS
        if total and seconds_by_kind[kind] / total >= 0.005
    ]
    return ", ".join(shares)


@themed
def workers_picture(run: RunFolder) -> str | None:
    """All workers over the whole run."""
    return draw(run, lambda timeline: (0.0, timeline.end_s), whole=True)


@themed
def last_steps_workers_picture(run: RunFolder) -> str | None:
    """All workers over the last ZOOM_STEPS steps; None where the run is hardly longer."""

    def window(timeline: Timeline) -> Span | None:
        steps = timeline.steps
        return (steps[-ZOOM_STEPS - 1][1], steps[-1][1]) if len(steps) > ZOOM_STEPS + 2 else None

    return draw(run, window, whole=False)


def draw(run: RunFolder, window: Callable[[Timeline], Span | None], whole: bool) -> str | None:
    if not run.worker_events:
        return None
    timeline = timeline_of(run)
    drawn_window = window(timeline)
    if drawn_window is None:
        return None
    begin_s, end_s = drawn_window
    draws_spans = not whole or len(timeline.steps) <= MANY_STEPS
    tracks = worker_tracks(timeline.events, begin_s, end_s, SPAN_RESOLUTION if draws_spans else math.inf)
    add_idle_spans(tracks, timeline.learner, begin_s, end_s)
    tracks = tracks[:MAX_DRAWN_WORKERS]
    row_in = 0.34 if len(tracks) <= 8 else 0.24
    figure, (axes,) = new_figure(row_in * len(tracks))
    if draws_spans:
        draw_spans(axes, tracks)
    else:
        draw_shares(axes, tracks, np.linspace(begin_s, end_s, SHARE_INTERVALS + 1))
    numbered = not whole or len(timeline.steps) <= ZOOM_STEPS + 2
    if numbered:
        draw_instants(axes, tracks, "abort", VIOLET, "|", 12)
        mark_steps(axes, [(step, at_s) for step, at_s in timeline.steps if begin_s <= at_s <= end_s])
    draw_instants(axes, tracks, "joined", GREEN, "^", 6.5)
    draw_instants(axes, tracks, "lost", RED, "X", 7)
    for at_s, pause_s in timeline.pauses:
        if begin_s <= at_s <= end_s:
            axes.axvline(at_s, color=MUTED, lw=1, ls=(0, (1, 2)), label="paused")
            note_above(axes, at_s, duration(pause_s))
    axes.set_xlim(begin_s - 0.01 * (end_s - begin_s), end_s + 0.005 * (end_s - begin_s))
    axes.set_yticks(range(len(tracks)), [track.worker for track in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds since the first worker's event" + (", pauses left out" if timeline.pauses else ""))
    rows = legend(axes, lift_in=0.2 if numbered or timeline.pauses else 0.0)
    figure.set_figheight(row_in * len(tracks) + 0.95 + LEGEND_ROW_IN * rows)
    return to_svg(figure, "what every worker did over time" if whole else "what every worker did in the last steps")


def draw_spans(axes: "Axes", tracks: list[WorkerTrack]) -> None:
    for kind, label, color, half_height in BARS:
        boxes = [
            (left, right, float(row)) for row, track in enumerate(tracks) for left, right in track.spans.get(kind, [])
        ]
        draw_boxes(axes, boxes, color, half_height, label)


def draw_shares(axes: "Axes", tracks: list[WorkerTrack], edges_s: np.ndarray) -> None:
    """Draw each row as stacked shares of time by activity, one stack per interval between `edges_s`."""
    labelled = set()
    for row, track in enumerate(tracks):
        level = np.full(len(edges_s) - 1, row + 0.38)
        for kind, label, color, _ in BARS:
            if not track.spans.get(kind):
                continue
            above = level - 0.76 * busy_share(track.spans[kind], edges_s)
            new_label = None if kind in labelled else label
            axes.stairs(above, edges_s, baseline=level, fill=True, color=color, lw=0, label=new_label)
            labelled.add(kind)
            level = above


def draw_instants(axes: "Axes", tracks: list[WorkerTrack], kind: str, color: str, marker: str, size: float) -> None:
    points = [(at_s, row) for row, track in enumerate(tracks) for at_s in track.instants.get(kind, [])]
    if points:
        x, y = zip(*points, strict=True)
        edge = 1.8 if marker == "|" else 0
        axes.plot(x, y, ls="", marker=marker, ms=size, mew=edge, color=color, clip_on=False, label=kind)


def mark_steps(axes: "Axes", steps: list[tuple[int, float]]) -> None:
    """Draw a thin line where each step was recorded, with its number above."""
    for step, at_s in steps:
        axes.axvline(at_s, color=MUTED, lw=0.7, ls=(0, (2, 2)), zorder=0.5)
        note_above(axes, at_s, f"{step}")


def note_above(axes: "Axes", at_s: float, text: str) -> None:
    axes.annotate(
        text,
        (at_s, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        color=MUTED,
        fontsize=8,
    )
