"""Rules about groups of samples, shared by broker and learner: which groups are kept for inspection, and when rewards
count as different."""

import random
from collections.abc import Sequence


def chosen_groups(rewards: Sequence[Sequence[float]], count: int | None, seed: str) -> list[int]:
    """Indices of `count` groups: those with the best and the worst sample, then random ones; all if `count` is None.

    `rewards`: the rewards of each group's samples; groups without samples are not chosen. `seed`: seed of the random
    choice.
    """
    groups = [group for group, group_rewards in enumerate(rewards) if group_rewards]
    if count is None or len(groups) <= count:
        return groups
    best = max(groups, key=lambda group: max(rewards[group]))
    worst = min(groups, key=lambda group: min(rewards[group]))
    others = [group for group in groups if group not in (best, worst)]
    return list(dict.fromkeys([best, worst, *random.Random(seed).sample(others, len(others))]))[:count]


SPREAD = 1e-6
"""Largest difference between rewards, or accuracies, that counts as equal: 0.1 + 0.2 equals 0.3."""


def has_spread(figures: list[float]) -> bool:
    return len(figures) > 0 and max(figures) - min(figures) > SPREAD
