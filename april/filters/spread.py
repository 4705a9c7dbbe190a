"""When a group says anything: the broker's filter and the learner's advantages go by the same rule."""

SPREAD = 1e-6
"""rewards and accuracies that differ by no more are the same: 0.1 + 0.2 is 0.3"""


def has_spread(figures: list[float]) -> bool:
    return len(figures) > 0 and max(figures) - min(figures) > SPREAD
