"""Worker lanes made small enough to draw: near spans are merged, marks that would overlap are drawn once."""

import re
from dataclasses import dataclass, field

Span = tuple[float, float]


@dataclass
class Lane:
    """What one worker did, on the clock of its entries (seconds)."""

    worker: str
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """generate, weights: (start, end)."""
    instants: dict[str, list[float]] = field(default_factory=dict)
    """abort, joined, lost."""


def make_lanes(entries: list[dict], start_s: float, end_s: float, resolution: int) -> list[Lane]:
    """Lanes of `[start_s, end_s]` by worker; what is nearer than a `resolution`-th of the window is one thing."""
    smallest_s = (end_s - start_s) / resolution
    lanes: dict[str, Lane] = {}
    for entry in entries:
        lane = lanes.setdefault(entry["worker"], Lane(entry["worker"]))
        begin, end = entry["start"], entry["end"] if entry.get("end") is not None else entry["start"]
        if end < start_s or begin > end_s:
            continue
        kind = entry.get("kind")
        if kind in ("generate", "weights"):
            lane.spans.setdefault(kind, []).append((max(begin, start_s), min(end, end_s)))
        elif kind in ("abort", "joined", "lost"):
            lane.instants.setdefault(kind, []).append(begin)
    for lane in lanes.values():
        lane.spans = {kind: merge_spans(spans, smallest_s) for kind, spans in lane.spans.items()}
        lane.instants = {kind: thin(times, smallest_s) for kind, times in lane.instants.items()}
    return sorted(lanes.values(), key=lambda lane: natural(lane.worker))


def merge_spans(spans: list[Span], gap_s: float) -> list[Span]:
    """Disjoint spans in order; those with less than `gap_s` between them become one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] < gap_s:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


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
