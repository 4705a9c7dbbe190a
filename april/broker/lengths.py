"""Whether training sees the lengths that generation makes: created against trained, by creation cohort."""

from collections import Counter

import numpy as np

BINS_PER_OCTAVE = 4


def histogram(lengths: list[int]) -> dict[str, int]:
    """Key i counts the lengths in [2^(i/4), 2^((i+1)/4)) tokens; empty responses are not counted."""
    values = np.array([length for length in lengths if length > 0])
    bins = np.floor(np.log2(values) * BINS_PER_OCTAVE).astype(int) if len(values) else []
    return {str(key): count for key, count in sorted(Counter(map(int, bins)).items())}


def describe(lengths: list[int]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in tokens; None for no lengths."""
    if not lengths:
        return None
    p50, p95, p99 = np.percentile(lengths, [50, 95, 99])
    return {
        "mean": round(float(np.mean(lengths)), 2),
        "p50": round(float(p50), 1),
        "p95": round(float(p95), 1),
        "p99": round(float(p99), 1),
        "max": max(lengths),
    }


class LengthCohorts:
    """Groups in cohorts by creation. A cohort is settled when each of its groups is trained or discarded, so
    that short responses, which finish first, are never compared with long ones that are still on the way."""

    def __init__(self, cohort_groups: int):
        self.cohort_groups = cohort_groups
        self.settled = 0
        self.created: list[int] = []
        self.trained: list[int] = []
        self._open: dict[int, dict[int, tuple[list[int], list[int]]]] = {}

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """The `ordinal`-th group created has come to its end; lengths of all its responses and of those trained
        (tokens). Doing so again, as a learner does that restarts, changes nothing."""
        cohort = ordinal // self.cohort_groups
        if cohort < self.settled:
            return
        self._open.setdefault(cohort, {})[ordinal] = (created, trained)
        while len(self._open.get(self.settled, ())) == self.cohort_groups:
            for group_created, group_trained in self._open.pop(self.settled).values():
                self.created += group_created
                self.trained += group_trained
            self.settled += 1

    def summary(self) -> dict:
        """`lengths` of summary.json: settled cohorts only."""
        ratio = np.mean(self.trained) / np.mean(self.created) if self.trained and any(self.created) else None
        return {
            "created": describe(self.created),
            "trained": describe(self.trained),
            "settled_cohorts": self.settled,
            "ratio": None if ratio is None else round(float(ratio), 4),
        }
