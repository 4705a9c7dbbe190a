"""The pictures of worker lanes over time, with what each worker was waiting for; pauses between resumes are cut out."""

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
from april.report.lanes import Lane, Span, busy_share, intersect, make_lanes, merge_spans, subtract
from april.report.run_folder import Run, dig
from april.report.series import MANY_STEPS, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_WORKERS = 24
ZOOM_STEPS = 10
SPAN_RESOLUTION = 1000
"""Spans and marks nearer than this part of the drawn time are drawn as one."""
SHARE_INTERVALS = 120
PAUSE_S = 1.0
"""what is left of a pause between two starts of a run"""
SHORTEST_WAIT_S = 1e-3
BARS = [
    ("generate", "generating", BLUE, 0.26),
    ("weights", "weight update", ORANGE, 0.38),
    ("wait-others", "waits: others generate", WAITING["wait-others"], 0.2),
    ("wait-learner", "waits: the learner trains", WAITING["wait-learner"], 0.2),
    ("wait-weights", "waits: weights are sent", WAITING["wait-weights"], 0.2),
    ("wait-else", "waits: broker, scores", WAITING["wait-else"], 0.2),
]
LEGEND_ROW_IN = 0.19
WAITS = [kind for kind, *_ in BARS if kind.startswith("wait")]


@dataclass
class Timeline:
    """What workers did, on one clock that begins with the first of it and leaves out pauses (seconds)."""

    entries: list[dict]
    steps: list[tuple[int, float]]
    """number and time of each recorded step"""
    learner: list[Span]
    """in which it trained"""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """where one was cut out, and how long it was"""

    @property
    def end_s(self) -> float:
        return max(1e-3, *(entry["end"] for entry in self.entries))


def timeline_of(run: Run) -> Timeline:
    lanes = [lane | {"end": max(lane["start"], lane.get("end") or 0)} for lane in run.lanes]
    steps = [
        (step["step"], step["time"], dig(step, "learner", "train_s") or 0.0) for step in run.steps if "time" in step
    ]
    steps = [one for one in steps if one[1] is not None]
    ends = sorted([*(lane["end"] for lane in lanes), *(time for _, time, _ in steps)])
    starts = sorted([*(lane["start"] for lane in lanes), *(time - trained_s for _, time, trained_s in steps)])
    cuts: list[Span] = []
    for resume in run.resumes:
        before = [end for end in ends if end <= resume["time"]]
        after = [start for start in starts if start >= resume["time"]]
        if before and after and after[0] - before[-1] > 2 * PAUSE_S:
            cuts.append((before[-1], after[0]))
    to_clock = partial(on_clock, cuts=cuts, origin=starts[0])
    return Timeline(
        [lane | {"start": to_clock(lane["start"]), "end": to_clock(lane["end"])} for lane in lanes],
        [(step, to_clock(time)) for step, time, _ in steps],
        merge_spans([(to_clock(time - trained_s), to_clock(time)) for _, time, trained_s in steps], 0.0),
        [(to_clock(begin), end - begin) for begin, end in cuts],
    )


def on_clock(time: float, cuts: list[Span], origin: float) -> float:
    """Seconds since `origin`, each cut counted as PAUSE_S at the most."""
    cut = sum(min(time, end) - begin - min(PAUSE_S, min(time, end) - begin) for begin, end in cuts if time > begin)
    return time - origin - cut


def add_waits(lanes: list[Lane], learner: list[Span], begin_s: float, end_s: float) -> None:
    """Say of each lane what it waited for: while others generate, for the end of their responses; otherwise for the
    learner while that trains; then, if weights come next, for these; else for the broker, or for scores."""
    generating = merge_spans([span for lane in lanes for span in lane.spans.get("generate", [])], 0.0)
    for lane in lanes:
        busy = merge_spans([span for kind in ("generate", "weights") for span in lane.spans.get(kind, [])], 0.0)
        idle = subtract(subtract([(begin_s, end_s)], busy), absences(lane, begin_s, end_s))
        lane.spans["wait-others"] = intersect(idle, generating)
        idle = subtract(idle, generating)
        lane.spans["wait-learner"] = intersect(idle, learner)
        idle = subtract(idle, learner)
        updates = {start for start, _ in lane.spans.get("weights", [])}
        lane.spans["wait-weights"] = [span for span in idle if span[1] in updates]
        lane.spans["wait-else"] = [span for span in idle if span[1] not in updates]
        for kind in WAITS:
            lane.spans[kind] = [span for span in lane.spans[kind] if span[1] - span[0] > SHORTEST_WAIT_S]


def absences(lane: Lane, begin_s: float, end_s: float) -> list[Span]:
    """Before it first joined, and from each loss to the next time that it joined or did something."""
    joined = sorted([*lane.instants.get("joined", []), *(span[0] for spans in lane.spans.values() for span in spans)])
    away = [(begin_s, joined[0] if joined else end_s)]
    for lost in lane.instants.get("lost", []):
        away.append((lost, next((time for time in joined if time > lost), end_s)))
    return merge_spans([span for span in away if span[1] > span[0]], 0.0)


def waiting(run: Run) -> str:
    """How the workers' time was spent, in one sentence; empty without lanes."""
    if not run.lanes:
        return ""
    timeline = timeline_of(run)
    lanes = make_lanes(timeline.entries, 0.0, timeline.end_s, math.inf)
    add_waits(lanes, timeline.learner, 0.0, timeline.end_s)
    spent = {kind: sum(b - a for lane in lanes for a, b in lane.spans.get(kind, [])) for kind, *_ in BARS}
    total = sum(spent.values())
    shares = [
        f"{spent[kind] / total:.0%} {label}" for kind, label, *_ in BARS if total and spent[kind] / total >= 0.005
    ]
    return ", ".join(shares)


@themed
def lanes_picture(run: Run) -> str | None:
    """The whole run."""
    return draw(run, lambda timeline: (0.0, timeline.end_s), whole=True)


@themed
def last_lanes_picture(run: Run) -> str | None:
    """The last steps enlarged, where the run is longer than that."""

    def window(timeline: Timeline) -> Span | None:
        steps = timeline.steps
        return (steps[-ZOOM_STEPS - 1][1], steps[-1][1]) if len(steps) > ZOOM_STEPS + 2 else None

    return draw(run, window, whole=False)


def draw(run: Run, window: Callable[[Timeline], Span | None], whole: bool) -> str | None:
    if not run.lanes:
        return None
    timeline = timeline_of(run)
    shown = window(timeline)
    if shown is None:
        return None
    begin_s, end_s = shown
    one_by_one = not whole or len(timeline.steps) <= MANY_STEPS
    lanes = make_lanes(timeline.entries, begin_s, end_s, SPAN_RESOLUTION if one_by_one else math.inf)
    add_waits(lanes, timeline.learner, begin_s, end_s)
    lanes = lanes[:MAX_DRAWN_WORKERS]
    row_in = 0.34 if len(lanes) <= 8 else 0.24
    figure, (axes,) = new_figure(row_in * len(lanes))
    if one_by_one:
        draw_spans(axes, lanes)
    else:
        draw_shares(axes, lanes, np.linspace(begin_s, end_s, SHARE_INTERVALS + 1))
    numbered = not whole or len(timeline.steps) <= ZOOM_STEPS + 2
    if numbered:
        draw_instants(axes, lanes, "abort", VIOLET, "|", 12)
        mark_steps(axes, [(step, at_s) for step, at_s in timeline.steps if begin_s <= at_s <= end_s])
    draw_instants(axes, lanes, "joined", GREEN, "^", 6.5)
    draw_instants(axes, lanes, "lost", RED, "X", 7)
    for at_s, pause_s in timeline.pauses:
        if begin_s <= at_s <= end_s:
            axes.axvline(at_s, color=MUTED, lw=1, ls=(0, (1, 2)), label="paused")
            note_above(axes, at_s, duration(pause_s))
    axes.set_xlim(begin_s - 0.01 * (end_s - begin_s), end_s + 0.005 * (end_s - begin_s))
    axes.set_yticks(range(len(lanes)), [lane.worker for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds since the first worker's event" + (", pauses left out" if timeline.pauses else ""))
    rows = legend(axes, lift_in=0.2 if numbered or timeline.pauses else 0.0)
    figure.set_figheight(row_in * len(lanes) + 0.95 + LEGEND_ROW_IN * rows)
    return to_svg(figure, "what every worker did over time" if whole else "what every worker did in the last steps")


def draw_spans(axes: "Axes", lanes: list[Lane]) -> None:
    for kind, label, color, half_height in BARS:
        boxes = [
            (left, right, float(row)) for row, lane in enumerate(lanes) for left, right in lane.spans.get(kind, [])
        ]
        draw_boxes(axes, boxes, color, half_height, label)


def draw_shares(axes: "Axes", lanes: list[Lane], edges_s: np.ndarray) -> None:
    """In every row the share of each interval that went into each thing, upon each other."""
    named = set()
    for row, lane in enumerate(lanes):
        level = np.full(len(edges_s) - 1, row + 0.38)
        for kind, label, color, _ in BARS:
            if not lane.spans.get(kind):
                continue
            above = level - 0.76 * busy_share(lane.spans[kind], edges_s)
            shown = None if kind in named else label
            axes.stairs(above, edges_s, baseline=level, fill=True, color=color, lw=0, label=shown)
            named.add(kind)
            level = above


def draw_instants(axes: "Axes", lanes: list[Lane], kind: str, color: str, marker: str, size: float) -> None:
    points = [(at_s, row) for row, lane in enumerate(lanes) for at_s in lane.instants.get(kind, [])]
    if points:
        x, y = zip(*points, strict=True)
        edge = 1.8 if marker == "|" else 0
        axes.plot(x, y, ls="", marker=marker, ms=size, mew=edge, color=color, clip_on=False, label=kind)


def mark_steps(axes: "Axes", steps: list[tuple[int, float]]) -> None:
    """A thin line where each step was recorded, its number above."""
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
