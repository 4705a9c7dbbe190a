"""Whether what has been trained lately has the lengths of what was created: the alarm against length bias.

The distance is Kolmogorov and Smirnov's: the largest difference between two distributions. How large it may be by
chance is found by exchanging whole groups between the sides at random, since siblings resemble each other: each group
of one side has a partner on the other, with which it changes places or not.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from april.broker.ledger.cohorts import LengthCohorts

LEVEL = 0.99
"""share of random exchanges whose distance is within the band"""
BLOCKS, BLOCK_EXCHANGES = 20, 20
"""all exchanges at once would take tens of MiB with large batches"""
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


def drift_of(cohorts: LengthCohorts) -> Drift | None:
    """Until both windows are full there is no verdict: the first batches of a run are of short responses by nature,
    and have left the window by then."""
    trained, created = cohorts.lately_trained, cohorts.lately_created
    if min(len(trained), len(created)) < cohorts.recent_groups:
        return None
    return measure_drift(list(trained), list(created))


def measure_drift(ours: list[list[int]], theirs: list[list[int]], seed: int = 0) -> Drift:
    """Of as many groups on either side, each the lengths of its responses (tokens)."""
    groups = [*ours, *theirs]
    sizes = [len(group) for group in groups]
    lengths = np.fromiter(chain.from_iterable(groups), np.int64, sum(sizes))
    owner = np.repeat(np.arange(len(groups)), sizes)
    points = np.unique(np.quantile(lengths, np.linspace(0, 1, POINTS), method="inverted_cdf"))
    places = np.searchsorted(points, lengths)
    counts = np.bincount(owner * len(points) + places, minlength=len(groups) * len(points))
    up_to = counts.reshape(2, len(ours), len(points)).cumsum(axis=2).astype(float)
    """responses of each group that are no longer than each point"""
    first, second = up_to.sum(axis=1)

    def distances(moved: np.ndarray) -> np.ndarray:
        """`moved`: float [exchanges, points], by how much the first side has more of them and the second less."""
        one, other = first + moved, second - moved
        return np.abs(one / one[:, -1:] - other / other[:, -1:]).max(axis=1)

    gains, rng = up_to[1] - up_to[0], np.random.default_rng(seed)
    exchanges = (rng.integers(0, 2, (BLOCK_EXCHANGES, len(ours))).astype(float) for _ in range(BLOCKS))
    band = np.quantile([distances(swapped @ gains) for swapped in exchanges], LEVEL)
    return Drift(float(distances(np.zeros((1, len(points))))[0]), float(band))
