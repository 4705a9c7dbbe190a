"""Whether training sees the lengths that generation makes: created against trained, by creation cohort."""

from collections import Counter

import numpy as np

from april.broker.length_drift import LengthDrift

BINS_PER_OCTAVE = 4

Lengths = Counter[int]
"""how many responses have each length (tokens)"""


def histogram(lengths: Lengths) -> dict[str, int]:
    """Key i counts the lengths in [2^(i/4), 2^((i+1)/4)) tokens; empty responses are not counted."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        if length > 0:
            bins[int(np.floor(np.log2(length) * BINS_PER_OCTAVE))] += count
    return {str(key): bins[key] for key in sorted(bins)}


def mean(lengths: Lengths) -> float:
    return sum(length * count for length, count in lengths.items()) / lengths.total()


def describe(lengths: Lengths) -> dict[str, float] | None:
    """Mean, percentiles and maximum in tokens; None for no lengths."""
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
    """The same with how many responses they are of."""
    described = describe(lengths)
    return described and described | {"responses": lengths.total()}


class LengthCohorts:
    """Groups in cohorts by creation. A cohort is settled when each of its groups is trained or discarded, so
    that short responses, which finish first, are never compared with long ones that are still on the way."""

    def __init__(self, cohort_groups: int):
        self.cohort_groups = cohort_groups
        self.settled = 0
        self.created: Lengths = Counter()
        self.trained: Lengths = Counter()
        self.waiting: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        """by cohort and ordinal: (created, trained) of the groups that have ended in cohorts that are not settled"""
        self.drift = LengthDrift(cohort_groups)
        """of this broker's time; a restart begins anew"""

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """The `ordinal`-th group created has come to its end; lengths of all its responses and of those trained
        (tokens). Doing so again, as a learner does that restarts, changes nothing."""
        cohort = ordinal // self.cohort_groups
        if cohort < self.settled:
            return
        ended = self.waiting.setdefault(cohort, {})
        if trained and ordinal not in ended:
            self.drift.trained.append(trained)
        ended[ordinal] = (created, trained)
        while len(self.waiting.get(self.settled, ())) == self.cohort_groups:
            for group_created, group_trained in self.waiting.pop(self.settled).values():
                self.created.update(group_created)
                self.drift.created.append(group_created)
                self.trained.update(group_trained)
            self.settled += 1

    def summary(self) -> dict:
        """`lengths` of summary.json: settled cohorts only."""
        ratio = mean(self.trained) / mean(self.created) if self.trained and any(self.created) else None
        return {
            "created": counted(self.created),
            "trained": counted(self.trained),
            "settled_cohorts": self.settled,
            "ratio": None if ratio is None else round(ratio, 4),
        }
