"""Timelines of workers, small enough to draw: close spans are merged, and overlapping marks are drawn once."""

import re
from dataclasses import dataclass, field

import numpy as np

Span = tuple[float, float]
"""(start, end) in seconds."""


@dataclass
class WorkerTrack:
    """What one worker did over time, in seconds on the clock of its events."""

    worker: str
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """Spans by kind: "generate", "weights", and the waits that `add_idle_spans` adds."""
    instants: dict[str, list[float]] = field(default_factory=dict)
    """Times by kind: "abort", "joined", "lost"."""


def worker_tracks(events: list[dict], begin_s: float, end_s: float, resolution: float) -> list[WorkerTrack]:
    """Each worker's timeline in the window `[begin_s, end_s]`. Spans and marks that lie closer together than the
    window's length divided by `resolution` are merged."""
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
    """The share of each interval between `edges_s`, float64 [n + 1], that `spans` (disjoint, in order) cover: [n]."""
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
    """The time that lies in both lists of spans (each disjoint and in order)."""
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
    """The time of `spans` that is not in `others` (each disjoint and in order)."""
    remaining = []
    for start, end in spans:
        for begin, stop in intersect([(start, end)], others):
            if begin > start:
                remaining.append((start, begin))
            start = stop
        if end > start:
            remaining.append((start, end))
    return remaining


def thin_out(times: list[float], gap_s: float) -> list[float]:
    """The times in order, without those less than `gap_s` after a kept one."""
    kept: list[float] = []
    for time in sorted(times):
        if not kept or time - kept[-1] >= gap_s:
            kept.append(time)
    return kept


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
