"""Whether what has been trained lately has the lengths of what was created: the alarm against length bias.

The distance is Kolmogorov and Smirnov's: the largest difference between two distributions. How large it may be by
chance is found by exchanging whole groups between the sides at random, since siblings resemble each other.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

RECENT_BATCHES = 20
"""of trained groups, and of created groups in cohorts that are settled"""
LEVEL = 0.99
"""share of random exchanges whose distance is within the band"""
EXCHANGES = 400
POINTS = 65
"""quantiles of all lengths at which the distributions are compared"""


@dataclass(frozen=True)
class Drift:
    distance: float
    band: float

    @property
    def alarm(self) -> bool:
        return self.distance > self.band

    def to_json(self) -> dict:
        return {"distance": round(self.distance, 4), "band": round(self.band, 4), "alarm": self.alarm}


class LengthDrift:
    """Two windows of groups. Until both are full there is no verdict: the first batches of a run are of short
    responses by nature, and have left the window by then."""

    def __init__(self, batch_groups: int):
        self.trained: deque[list[int]] = deque(maxlen=RECENT_BATCHES * batch_groups)
        self.created: deque[list[int]] = deque(maxlen=RECENT_BATCHES * batch_groups)

    def verdict(self) -> Drift | None:
        if len(self.trained) < self.trained.maxlen or len(self.created) < self.created.maxlen:
            return None
        return measure_drift(list(self.trained), list(self.created))


def measure_drift(ours: list[list[int]], theirs: list[list[int]], seed: int = 0) -> Drift:
    """Of two lists of groups, each the lengths of its responses (tokens)."""
    groups = [group for group in (*ours, *theirs) if group]
    lengths = np.concatenate([np.asarray(group) for group in groups])
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    points = np.unique(np.quantile(lengths, np.linspace(0, 1, POINTS), method="inverted_cdf"))
    places = np.searchsorted(points, lengths)
    counts = np.bincount(owner * len(points) + places, minlength=len(groups) * len(points))
    up_to = counts.reshape(len(groups), len(points)).cumsum(axis=1).astype(float)
    """responses of each group that are no longer than each point"""

    def distances(sides: np.ndarray) -> np.ndarray:
        """`sides`: float [exchanges, groups], 1 where a group is on the first side."""
        first = sides @ up_to
        second = up_to.sum(axis=0) - first
        return np.abs(first / first[:, -1:] - second / second[:, -1:]).max(axis=1)

    sides = (np.arange(len(groups)) < sum(1 for group in ours if group)).astype(float)
    rng = np.random.default_rng(seed)
    exchanged = rng.permuted(np.tile(sides, (EXCHANGES, 1)), axis=1)
    band = float(np.quantile(distances(exchanged), LEVEL))
    return Drift(float(distances(sides[None])[0]), band)
