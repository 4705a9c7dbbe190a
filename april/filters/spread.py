"""Whether the rewards of a group differ, by one rule for the broker's filter and the learner's advantages."""

SPREAD = 1e-6
"""Largest difference between rewards, or accuracies, that counts as equal: 0.1 + 0.2 equals 0.3."""


def has_spread(figures: list[float]) -> bool:
    return len(figures) > 0 and max(figures) - min(figures) > SPREAD
