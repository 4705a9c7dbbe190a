"""Response lengths, created and trained: histograms, summaries by creation cohort, and the drift between the two."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np

from april.broker.ledger.rules import LengthCohorts, Lengths

BINS_PER_OCTAVE = 4


def length_histogram(lengths: Lengths) -> dict[str, int]:
    """Histogram whose key i counts the lengths in [2^(i/4), 2^((i+1)/4)) tokens, without empty responses."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        if length > 0:
            bins[int(np.floor(np.log2(length) * BINS_PER_OCTAVE))] += count
    return {str(key): bins[key] for key in sorted(bins)}


def mean_length(lengths: Lengths) -> float:
    """Mean in tokens; there is a response at least."""
    return sum(length * count for length, count in lengths.items()) / lengths.total()


def describe_lengths(lengths: Lengths) -> dict[str, float] | None:
    """Mean, percentiles and maximum in tokens; None without responses."""
    if not lengths:
        return None
    values = np.array(sorted(lengths))
    p50, p95, p99 = np.percentile(np.repeat(values, [lengths[value] for value in values.tolist()]), [50, 95, 99])
    return {
        "mean": round(mean_length(lengths), 2),
        "p50": round(float(p50), 1),
        "p95": round(float(p95), 1),
        "p99": round(float(p99), 1),
        "max": int(values[-1]),
    }


def describe_with_count(lengths: Lengths) -> dict[str, float] | None:
    """`describe` with the number of responses."""
    described = describe_lengths(lengths)
    return described and described | {"responses": lengths.total()}


def summarise_cohorts(cohorts: LengthCohorts) -> dict:
    """`lengths` of summary.json, over settled cohorts only."""
    ratio = (
        mean_length(cohorts.trained) / mean_length(cohorts.created)
        if cohorts.trained and any(cohorts.created)
        else None
    )
    return {
        "created": describe_with_count(cohorts.created),
        "trained": describe_with_count(cohorts.trained),
        "settled_cohorts": cohorts.settled,
        "ratio": None if ratio is None else round(ratio, 4),
    }


# --- drift ------------------------------------------------------------------------------------------------------------


BAND_LEVEL = 0.99
"""Share of random exchanges whose distance lies within the band."""
BLOCKS, BLOCK_EXCHANGES = 20, 20
"""Blocks, and exchanges per block; all exchanges at once would take tens of MiB with large batches."""
COMPARED_QUANTILES = 65
"""Quantiles of all lengths at which the distributions are compared."""


@dataclass(frozen=True)
class LengthDrift:
    """Distance between the lengths that are trained and those that are created."""

    distance: float
    """Kolmogorov–Smirnov distance, 0 to 1."""
    band: float
    """Largest distance that chance explains, at `LEVEL`."""

    @property
    def alarm(self) -> bool:
        return self.distance > self.band

    def to_json(self) -> dict:
        return {"distance": round(self.distance, 4), "band": round(self.band, 4), "alarm": self.alarm}


def drift_of(cohorts: LengthCohorts) -> LengthDrift | None:
    """Drift between the recent windows of the cohorts; None until both windows are full.

    The first batches of a run consist of the shortest responses, and have left the windows by then.
    """
    trained, created = cohorts.lately_trained, cohorts.lately_created
    if min(len(trained), len(created)) < cohorts.recent_groups:
        return None
    return measure_drift(list(trained), list(created))


def measure_drift(trained: list[list[int]], created: list[list[int]], seed: int = 0) -> LengthDrift:
    """Drift between two sides of equally many groups; a group is the lengths of its responses in tokens."""
    groups = [*trained, *created]
    sizes = [len(group) for group in groups]
    lengths = np.fromiter(chain.from_iterable(groups), np.int64, sum(sizes))
    owner = np.repeat(np.arange(len(groups)), sizes)
    points = np.unique(np.quantile(lengths, np.linspace(0, 1, COMPARED_QUANTILES), method="inverted_cdf"))
    bins = np.searchsorted(points, lengths)
    counts = np.bincount(owner * len(points) + bins, minlength=len(groups) * len(points))
    up_to = counts.reshape(2, len(trained), len(points)).cumsum(axis=2).astype(float)
    """[side, group, point]: responses of the group that are no longer than the point."""
    first, second = up_to.sum(axis=1)

    def distances(moved: np.ndarray) -> np.ndarray:
        """Distance after each exchange; `moved`: float [exchanges, points], counts moved from the second side to the
        first."""
        left, right = first + moved, second - moved
        return np.abs(left / left[:, -1:] - right / right[:, -1:]).max(axis=1)

    gains, rng = up_to[1] - up_to[0], np.random.default_rng(seed)
    exchanges = (rng.integers(0, 2, (BLOCK_EXCHANGES, len(trained))).astype(float) for _ in range(BLOCKS))
    band = np.quantile([distances(swapped @ gains) for swapped in exchanges], BAND_LEVEL)
    return LengthDrift(float(distances(np.zeros((1, len(points))))[0]), float(band))
