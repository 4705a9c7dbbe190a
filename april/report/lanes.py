"""Worker lanes made small enough to draw: near spans are merged, marks that would overlap are drawn once."""

import re
from dataclasses import dataclass, field

import numpy as np

Span = tuple[float, float]


@dataclass
class Lane:
    """What one worker did, on the clock of its entries (seconds)."""

    worker: str
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """generate, weights: (start, end)."""
    instants: dict[str, list[float]] = field(default_factory=dict)
    """abort, joined, lost."""


def make_lanes(entries: list[dict], begin_s: float, end_s: float, resolution: float) -> list[Lane]:
    """Lanes of `[begin_s, end_s]` by worker; what is nearer than a `resolution`-th of the window is one thing."""
    smallest_s = (end_s - begin_s) / resolution
    lanes: dict[str, Lane] = {}
    for entry in entries:
        lane = lanes.setdefault(entry["worker"], Lane(entry["worker"]))
        kind, start, end = entry.get("kind"), entry["start"], entry["end"]
        if end < begin_s or start > end_s:
            continue
        if kind in ("generate", "weights"):
            lane.spans.setdefault(kind, []).append((max(start, begin_s), min(end, end_s)))
        elif kind in ("abort", "joined", "lost"):
            lane.instants.setdefault(kind, []).append(start)
    for lane in lanes.values():
        lane.spans = {kind: merge_spans(spans, smallest_s) for kind, spans in lane.spans.items()}
        lane.instants = {kind: thin(times, smallest_s) for kind, times in lane.instants.items()}
    return sorted(lanes.values(), key=lambda lane: natural(lane.worker))


def busy_share(spans: list[Span], edges_s: np.ndarray) -> np.ndarray:
    """The share of each interval between edges that lies in the spans (disjoint, in order)."""
    knots_s = [edges_s[0], *(at_s for span in spans for at_s in span), edges_s[-1]]
    busy_s = np.cumsum([0, 0, *(part for k in range(len(spans)) for part in (spans[k][1] - spans[k][0], 0))])
    return np.diff(np.interp(edges_s, knots_s, busy_s)) / np.diff(edges_s)


def merge_spans(spans: list[Span], gap_s: float) -> list[Span]:
    """Disjoint spans in order; those with less than `gap_s` between them, or that overlap, become one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and (start <= merged[-1][1] or start - merged[-1][1] < gap_s):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(spans: list[Span], others: list[Span]) -> list[Span]:
    """What lies in both (each disjoint and in order)."""
    shared, at = [], 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        other = at
        while other < len(others) and others[other][0] < end:
            shared.append((max(start, others[other][0]), min(end, others[other][1])))
            other += 1
    return shared


def subtract(spans: list[Span], others: list[Span]) -> list[Span]:
    """What lies in the first alone (each disjoint and in order)."""
    left = []
    for start, end in spans:
        for begin, until in intersect([(start, end)], others):
            if begin > start:
                left.append((start, begin))
            start = until
        if end > start:
            left.append((start, end))
    return left


def thin(times: list[float], gap_s: float) -> list[float]:
    """Instants in order, without those that follow a kept one by less than `gap_s`."""
    kept: list[float] = []
    for time in sorted(times):
        if not kept or time - kept[-1] >= gap_s:
            kept.append(time)
    return kept


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
