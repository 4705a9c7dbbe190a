"""Which groups of a step are kept to be read: what the learner writes down and what the broker tells of it agree."""

import random
from collections.abc import Sequence


def chosen_groups(rewards: Sequence[Sequence[float]], count: int | None, seed: str) -> list[int]:
    """The groups with the best and the worst sample, then random ones; all without a `count`. `rewards`: of each
    group's samples."""
    numbers = [number for number, of_group in enumerate(rewards) if of_group]
    if count is None or len(numbers) <= count:
        return numbers
    best = max(numbers, key=lambda number: max(rewards[number]))
    worst = min(numbers, key=lambda number: min(rewards[number]))
    others = [number for number in numbers if number not in (best, worst)]
    return list(dict.fromkeys([best, worst, *random.Random(seed).sample(others, len(others))]))[:count]
