"""Division of a batch among its optimizer steps."""

import random


def minibatches(groups: int, count: int, rng: random.Random) -> list[int]:
    """Minibatch number of each group, at random by `rng`, in minibatches of equal size up to one group. A batch of
    fewer than `count` groups has fewer minibatches."""
    count = max(1, min(count, groups))
    if count == 1:
        return [0] * groups
    order = list(range(groups))
    rng.shuffle(order)
    return [position % count for position in order]
