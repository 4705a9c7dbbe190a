"""Timeline of each worker's activities and waits, as the run page draws it, and a sentence about what a live run waits
for.

Pauses between resumes of a run are cut out of the timeline of a whole run.
"""

import math
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from april.observe.report.facts import count, duration
from april.observe.report.run_folder import RunFolder, dig

# --- tracks of workers ------------------------------------------------------------------------------------------------

Span = tuple[float, float]
"""Time span (start, end) in seconds."""


@dataclass
class WorkerTrack:
    """Activities of one worker over time; times are in seconds on the same clock as the worker events they were made
    from."""

    worker: str
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """Spans by kind: "generate", "weights", and the waits that `add_idle_spans` adds."""
    instants: dict[str, list[float]] = field(default_factory=dict)
    """Times of momentary events by kind: "abort", "joined", "lost"."""


def worker_tracks(events: list[dict], begin_s: float, end_s: float, resolution: float) -> list[WorkerTrack]:
    """Each worker's timeline in the window `[begin_s, end_s]`, from its `events`, as `RunFolder.worker_events` has
    them. Spans and marks that lie closer together than the window's length divided by `resolution` are merged."""
    smallest_s = (end_s - begin_s) / resolution
    tracks: dict[str, WorkerTrack] = {}
    for event in events:
        track = tracks.setdefault(event["worker"], WorkerTrack(event["worker"]))
        kind, start, end = event.get("kind"), event["start"], event["end"]
        if end < begin_s or start > end_s:
            continue
        if kind in ("generate", "weights"):
            track.spans.setdefault(kind, []).append((max(start, begin_s), min(end, end_s)))
        elif kind in ("abort", "joined", "lost"):
            track.instants.setdefault(kind, []).append(start)
    for track in tracks.values():
        track.spans = {kind: merge_spans(spans, smallest_s) for kind, spans in track.spans.items()}
        track.instants = {kind: thin_out(times, smallest_s) for kind, times in track.instants.items()}
    return sorted(tracks.values(), key=lambda track: natural_key(track.worker))


def busy_share(spans: list[Span], edges_s: np.ndarray) -> np.ndarray:
    """Share, [n], of each of the n intervals between `edges_s`, float64 [n + 1], that is covered by `spans` (disjoint,
    in order)."""
    knots_s = [edges_s[0], *(at_s for span in spans for at_s in span), edges_s[-1]]
    busy_s = np.cumsum([0, 0, *(part for k in range(len(spans)) for part in (spans[k][1] - spans[k][0], 0))])
    return np.diff(np.interp(edges_s, knots_s, busy_s)) / np.diff(edges_s)


def merge_spans(spans: list[Span], gap_s: float) -> list[Span]:
    """The spans in order, where overlapping ones and those less than `gap_s` apart are merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and (start <= merged[-1][1] or start - merged[-1][1] < gap_s):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(spans: list[Span], others: list[Span]) -> list[Span]:
    """Spans of the time that is covered by both lists of spans (each disjoint and in order)."""
    shared, index = [], 0
    for start, end in spans:
        while index < len(others) and others[index][1] <= start:
            index += 1
        other = index
        while other < len(others) and others[other][0] < end:
            shared.append((max(start, others[other][0]), min(end, others[other][1])))
            other += 1
    return shared


def subtract(spans: list[Span], others: list[Span]) -> list[Span]:
    """Spans of the time that `spans` covers and `others` does not (each list disjoint and in order)."""
    edges = [-math.inf, *(at_s for span in others for at_s in span), math.inf]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return [(start, end) for start, end in intersect(spans, gaps) if start < end]


def thin_out(times: list[float], gap_s: float) -> list[float]:
    """The times in order, without those less than `gap_s` seconds after the last one that was kept."""
    kept: list[float] = []
    for time in sorted(times):
        if not kept or time - kept[-1] >= gap_s:
            kept.append(time)
    return kept


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers in a name as numbers: worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


# --- timeline of a run ------------------------------------------------------------------------------------------------

RESOLUTION = 1500
"""Timeline resolution: spans and marks closer together than the window's length divided by this number are merged."""
MARK_WIDTH = 40
"""Smallest distance at which the labels of two steps are both shown, in units of the window's length divided by
RESOLUTION."""
MAX_DRAWN_WORKERS = 24
"""Maximum number of workers in the timeline of a whole run; of more workers the first ones are drawn."""
MANY_STEPS = 60
"""Number of steps above which the timeline of a whole run has shares of time instead of spans."""
SHARE_INTERVALS = 120
"""Number of intervals into which a long run's timeline is divided; each has shares of time by activity."""
PAUSE_S = 1.0
"""Length, in seconds, to which a pause between two starts of the run is shortened in the timeline."""
SHORTEST_WAIT_S = 1e-3
ACTIVITIES = {
    "generate": "generating",
    "weights": "loading weights",
    "wait-others": "waits: others generate",
    "wait-learner": "waits: the learner trains",
    "wait-weights": "waits: weights are sent",
    "wait-else": "waits: broker, scores",
}
"""How each kind of span is described in the text about what the workers did."""
WAITS = [kind for kind in ACTIVITIES if kind.startswith("wait")]


@dataclass
class Timeline:
    """Events of a run on the timeline's clock: seconds since the first event, where each pause between two starts of
    the run counts as at most PAUSE_S."""

    events: list[dict]
    """Worker events, whose `start` and `end` are in seconds on the timeline's clock."""
    steps: list[tuple[int, float]]
    """(step, time at which the step was recorded, in seconds on the timeline's clock) of each step."""
    learner: list[Span]
    """Spans in which the learner trained, in seconds on the timeline's clock."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """(time on the timeline's clock, real length), both in seconds, of each pause between two starts of the run; the
    clock counts at most PAUSE_S of it."""

    @property
    def end_s(self) -> float:
        return max(1e-3, *(event["end"] for event in self.events), *(at_s for _, at_s in self.steps))

    def tracks(self, resolution: float = math.inf) -> list[WorkerTrack]:
        """Activities and waits of each worker over the whole run. Spans and marks that lie closer together than the
        run's length divided by `resolution` are merged; infinity: none are."""
        tracks = worker_tracks(self.events, 0.0, self.end_s, resolution)
        add_idle_spans(tracks, self.learner, 0.0, self.end_s)
        return tracks


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
    """Seconds from `origin` to `time`, where each of the `cuts` (pauses between two starts of the run) counts as at
    most PAUSE_S."""
    cut = sum(min(time, end) - begin - min(PAUSE_S, min(time, end) - begin) for begin, end in cuts if time > begin)
    return time - origin - cut


def add_idle_spans(tracks: list[WorkerTrack], learner: list[Span], begin_s: float, end_s: float) -> None:
    """Add to each worker's track the spans between `begin_s` and `end_s` in which it was idle, by what it waited for:
    for other workers' responses, while others generate; otherwise for the learner, while it trains (in the spans
    `learner`); before a weight update for weights; else for the broker or for scores."""
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


def learner_waits(
    tracks: list[WorkerTrack], learner: list[Span], begin_s: float, end_s: float
) -> dict[str, list[Span]]:
    """Spans between `begin_s` and `end_s` in which the learner does not train, by kind: "wait-others" while a worker
    generates, "wait-else" while it waits for the broker or for scores. `learner`: the spans in which it trains."""
    idle = subtract([(begin_s, end_s)], learner)
    generating = merge_spans([span for track in tracks for span in track.spans.get("generate", [])], 0.0)
    waits = {"wait-others": intersect(idle, generating), "wait-else": subtract(idle, generating)}
    return {kind: [span for span in spans if span[1] - span[0] > SHORTEST_WAIT_S] for kind, spans in waits.items()}


def absent_spans(track: WorkerTrack, begin_s: float, end_s: float) -> list[Span]:
    """Spans between `begin_s` and `end_s` in which the worker was not in the run: before it first joined, and from each
    time that it was lost until it joined again or did anything."""
    joined = sorted([*track.instants.get("joined", []), *(span[0] for spans in track.spans.values() for span in spans)])
    away = [(begin_s, joined[0] if joined else end_s)]
    for lost in track.instants.get("lost", []):
        away.append((lost, next((time for time in joined if time > lost), end_s)))
    return merge_spans([span for span in away if span[1] > span[0]], 0.0)


def activity_shares(tracks: list[WorkerTrack]) -> str:
    """Shares of the workers' time by activity, as a clause such as `62% generating, 38% waits: the learner trains`; ""
    if there are no spans."""
    seconds_by_kind = {
        kind: sum(b - a for track in tracks for a, b in track.spans.get(kind, [])) for kind in ACTIVITIES
    }
    total = sum(seconds_by_kind.values())
    shares = [
        f"{seconds_by_kind[kind] / total:.0%} {label}"
        for kind, label in ACTIVITIES.items()
        if total and seconds_by_kind[kind] / total >= 0.005
    ]
    return ", ".join(shares)


def drawn_tracks(tracks: list[WorkerTrack]) -> list[dict[str, Any]]:
    """The tracks as JSON objects, one for each lane of a picture, with times in seconds rounded to milliseconds."""
    return [
        {
            "worker": track.worker,
            "spans": {
                kind: [(round(a, 3), round(b, 3)) for a, b in spans] for kind, spans in track.spans.items() if spans
            },
            "instants": {kind: [round(at_s, 3) for at_s in times] for kind, times in track.instants.items()},
        }
        for track in tracks
    ]


def drawn_steps(steps: list[tuple[int, float]], length_s: float) -> list[tuple[float, int]]:
    """(time, step) of those `steps`, each (step, time), whose labels do not overlap in a picture of a window of
    `length_s` seconds."""
    named = set(thin_out([at_s for _, at_s in steps], MARK_WIDTH * length_s / RESOLUTION))
    return [(at_s, step) for step, at_s in steps if at_s in named]


def whole_timeline(run: RunFolder) -> dict[str, Any]:
    """Timeline of a whole run, small enough to draw: of up to MANY_STEPS steps the spans of each worker and of the
    learner, of more the shares of time by activity in SHARE_INTERVALS intervals. {} without worker events."""
    if not run.worker_events:
        return {}
    timeline = timeline_of(run)
    end_s, tracks = timeline.end_s, timeline.tracks()
    learner = {"train": timeline.learner, **learner_waits(tracks, timeline.learner, 0.0, end_s)}
    answer = {
        "begin": 0.0,
        "end": end_s,
        "origin": 0.0,
        "steps": drawn_steps(timeline.steps, end_s),
        "pauses": timeline.pauses,
        "workers": len(tracks),
        "activity": activity_shares(tracks),
        "learner": None,
    }
    if len(timeline.steps) > MANY_STEPS:
        edges_s = np.linspace(0.0, end_s, SHARE_INTERVALS + 1)
        tracks = tracks[:MAX_DRAWN_WORKERS]
        shares = [
            {kind: busy_share(spans, edges_s).round(3) for kind, spans in track.spans.items() if spans}
            for track in tracks
        ]
        for track in tracks:
            track.spans = {}
            track.instants.pop("abort", None)
            track.instants = {kind: thin_out(times, end_s / RESOLUTION) for kind, times in track.instants.items()}
        lanes = [lane | {"shares": share} for lane, share in zip(drawn_tracks(tracks), shares, strict=True)]
        of_learner = {kind: busy_share(spans, edges_s).round(3) for kind, spans in learner.items() if spans}
        answer["learner"] = {"shares": of_learner}
    else:
        lanes = drawn_tracks(timeline.tracks(RESOLUTION)[:MAX_DRAWN_WORKERS])
        answer["learner"] = {"spans": {kind: merge_spans(spans, end_s / RESOLUTION) for kind, spans in learner.items()}}
    return answer | {"lanes": lanes}


# --- what a run waits for ---------------------------------------------------------------------------------------------

PHASE_SENTENCES = {
    "waiting for weights": "Workers wait for weights",
    "draining": "Drained by an operator: leases are still coming back",
    "drained": "Drained by an operator: nothing is handed out until `april drain --end`",
    "evaluating": "Only the evaluation is being generated",
    "waiting for agents": "Agents have the word; no sample is being generated",
    "finished": "The run is over; workers and learner are leaving",
}
"""What a run waits for, as a sentence, by the phase in its broker's status; for phases in which it waits for no
group."""


def waiting_for(status: dict[str, Any]) -> str:
    """One sentence about what a run waits for now, from its broker's status.

    Example: `3 of 32 groups wait for w2, the longest has 7,912 tokens, for 41s; the learner is idle.`
    """
    bottleneck = status.get("standing") or {}
    if status.get("read_only"):
        return f"The broker can write nothing down: {status['read_only']}."
    learner = (bottleneck.get("learner") or {}).get("does", "absent")
    if not status.get("workers") and status.get("phase") != "finished":
        return f"No worker is connected; {learner_clause(learner)}."
    if sentence := PHASE_SENTENCES.get(status.get("phase") or ""):
        return f"{sentence}; {learner_clause(learner)}." if learner != "absent" else f"{sentence}."
    batch, holders = bottleneck.get("batch") or {}, bottleneck.get("holding_up") or []
    if not batch.get("missing"):
        return f"A batch is complete; {learner_clause(learner)}."
    if not holders:
        return f"Nothing of the next batch is open yet; {learner_clause(learner)}."
    return f"{holder_clause(holders[0], batch, len(holders) - 1)}; {learner_clause(learner)}."


def holder_clause(first: dict[str, Any], batch: dict[str, Any], others: int) -> str:
    """The clause, of a sentence about what a run waits for, on the process that holds most of the groups that the next
    batch still lacks. `first`: that process's entry in the broker's status; `batch`: the batch's entry; `others`: how
    many more processes hold such groups."""
    groups = f"{first['groups']} of {batch['needed']} groups wait"
    if first["groups"] == 1:
        groups = f"1 of {batch['needed']} groups waits"
    if not first["with"]:
        reason = "for a free slot"
    elif first["scoring"] == first["samples"]:
        reason = f"for scores at {first['with']}"
    elif first.get("tool") == first["samples"]:
        reason = f"for tools at {first['with']}"
    else:
        reason = f"for {first['with']}"
    longest = f", the longest has {count(first['tokens'])} tokens" if first["tokens"] else ""
    since = f", for {duration(first['for_s'])}" if first["for_s"] else ""
    more = f", and {others} others have some of them too" if others > 1 else ""
    return f"{groups} {reason}{longest}{since}{more}"


def learner_clause(does: str) -> str:
    return {"idle": "the learner is idle", "training": "the learner trains"}.get(does, "no learner is connected")
