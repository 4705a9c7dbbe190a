"""Response lengths, created and trained: histograms and summaries by creation cohort."""

from collections import Counter

import numpy as np

from april.broker.ledger.cohorts import LengthCohorts, Lengths

BINS_PER_OCTAVE = 4


def histogram(lengths: Lengths) -> dict[str, int]:
    """Histogram whose key i counts the lengths in [2^(i/4), 2^((i+1)/4)) tokens, without empty responses."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        if length > 0:
            bins[int(np.floor(np.log2(length) * BINS_PER_OCTAVE))] += count
    return {str(key): bins[key] for key in sorted(bins)}


def mean(lengths: Lengths) -> float:
    return sum(length * count for length, count in lengths.items()) / lengths.total()


def describe(lengths: Lengths) -> dict[str, float] | None:
    """Mean, percentiles and maximum in tokens; None without responses."""
    if not lengths:
        return None
    values = np.array(sorted(lengths))
    p50, p95, p99 = np.percentile(np.repeat(values, [lengths[value] for value in values.tolist()]), [50, 95, 99])
    return {
        "mean": round(mean(lengths), 2),
        "p50": round(float(p50), 1),
        "p95": round(float(p95), 1),
        "p99": round(float(p99), 1),
        "max": int(values[-1]),
    }


def counted(lengths: Lengths) -> dict[str, float] | None:
    """`describe` with the number of responses."""
    described = describe(lengths)
    return described and described | {"responses": lengths.total()}


def summarise_cohorts(cohorts: LengthCohorts) -> dict:
    """`lengths` of summary.json, over settled cohorts only."""
    ratio = mean(cohorts.trained) / mean(cohorts.created) if cohorts.trained and any(cohorts.created) else None
    return {
        "created": counted(cohorts.created),
        "trained": counted(cohorts.trained),
        "settled_cohorts": cohorts.settled,
        "ratio": None if ratio is None else round(ratio, 4),
    }
