"""How a batch is divided among the optimizer steps that train it."""

import random


def minibatches(groups: int, count: int, chance: random.Random) -> list[int]:
    """For each group the minibatch that it is trained in: at random, and as many in each as can be. A batch of fewer
    than `count` groups has fewer minibatches."""
    count = max(1, min(count, groups))
    if count == 1:
        return [0] * groups
    order = list(range(groups))
    chance.shuffle(order)
    return [place % count for place in order]
