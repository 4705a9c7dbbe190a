"""Lengths of created and of trained responses: histograms, summaries by cohort of creation, and the drift between the
two."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np

from april.broker.ledger.batches import LengthCohorts, Lengths

BINS_PER_OCTAVE = 4


def length_histogram(lengths: Lengths) -> dict[str, int]:
    """Histogram of lengths: key i counts the responses with a length in [2^(i/4), 2^((i+1)/4)) tokens; empty responses
    are left out."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        if length > 0:
            bins[int(np.floor(np.log2(length) * BINS_PER_OCTAVE))] += count
    return {str(key): bins[key] for key in sorted(bins)}


def mean_length(lengths: Lengths) -> float:
    """Mean of response lengths, tokens; `lengths` must not be empty."""
    return sum(length * count for length, count in lengths.items()) / lengths.total()


def describe_lengths(lengths: Lengths) -> dict[str, float] | None:
    """Mean, percentiles and maximum of response lengths in tokens; None without responses."""
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
    """Mean, percentiles and maximum of response lengths in tokens (`describe_lengths`), and the number of `responses`;
    None without responses."""
    described = describe_lengths(lengths)
    return described and described | {"responses": lengths.total()}


def summarise_cohorts(cohorts: LengthCohorts) -> dict:
    """Entry `lengths` of summary.json: lengths of created and of trained responses, and the ratio of their means. Only
    settled cohorts count: those whose groups are all trained or discarded."""
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
"""Probability with which the distance after a random exchange lies within the band: of all exchanges' distances, the
band is the quantile at this level."""
BLOCKS, BLOCK_EXCHANGES = 20, 20
"""Number of blocks in which the random exchanges are computed, and exchanges in a block; all at once would take tens of
MiB with large batches."""
COMPARED_QUANTILES = 65
"""Number of quantiles of all lengths at which the two length distributions are compared."""


@dataclass(frozen=True)
class LengthDrift:
    """Distance between the length distributions of trained and of created responses."""

    distance: float
    """Kolmogorov–Smirnov distance of the two distributions, 0 to 1."""
    band: float
    """Largest distance that chance explains: the quantile at `BAND_LEVEL` of the distances after random exchanges of
    trained and created groups."""

    @property
    def alarm(self) -> bool:
        return self.distance > self.band

    def to_json(self) -> dict:
        return {"distance": round(self.distance, 4), "band": round(self.band, 4), "alarm": self.alarm}


def drift_of(cohorts: LengthCohorts) -> LengthDrift | None:
    """Distance between the response lengths of the newest trained and of the newest created groups; None until there
    are enough of both: `LengthCohorts.recent_groups` each.

    The first batches of a run consist of the shortest responses; by then they are no longer among the newest.
    """
    trained, created = cohorts.lately_trained, cohorts.lately_created
    if min(len(trained), len(created)) < cohorts.recent_groups:
        return None
    return measure_drift(list(trained), list(created))


def measure_drift(trained: list[list[int]], created: list[list[int]], seed: int = 0) -> LengthDrift:
    """Drift between trained and created groups, of which there are equally many; each group is a list of its response
    lengths in tokens.

    Permutation test: in a random exchange, each pair of a trained and a created group swaps sides with probability 1/2.
    `seed`: seed of the random exchanges.
    """
    groups = [*trained, *created]
    sizes = [len(group) for group in groups]
    lengths = np.fromiter(chain.from_iterable(groups), np.int64, sum(sizes))
    owner = np.repeat(np.arange(len(groups)), sizes)
    points = np.unique(np.quantile(lengths, np.linspace(0, 1, COMPARED_QUANTILES), method="inverted_cdf"))
    bins = np.searchsorted(points, lengths)
    counts = np.bincount(owner * len(points) + bins, minlength=len(groups) * len(points))
    up_to = counts.reshape(2, len(trained), len(points)).cumsum(axis=2).astype(float)
    """Array [2 sides (trained, created), groups of a side, points]: number of the group's responses that are at most as
    long as the point, a length in tokens."""
    first, second = up_to.sum(axis=1)

    def distances(moved: np.ndarray) -> np.ndarray:
        """Kolmogorov–Smirnov distance between the two sides' length distributions after each exchange of groups, float
        [exchanges]. `moved`: float [exchanges, points]: number of responses of at most the point's length by which an
        exchange raises the trained side's count and lowers the created side's."""
        left, right = first + moved, second - moved
        return np.abs(left / left[:, -1:] - right / right[:, -1:]).max(axis=1)

    gains, rng = up_to[1] - up_to[0], np.random.default_rng(seed)
    exchanges = (rng.integers(0, 2, (BLOCK_EXCHANGES, len(trained))).astype(float) for _ in range(BLOCKS))
    band = np.quantile([distances(swapped @ gains) for swapped in exchanges], BAND_LEVEL)
    return LengthDrift(float(distances(np.zeros((1, len(points))))[0]), float(band))
