"""Samplers: how much each prompt of the dataset is worth another draw.

A sampler is a function (rows) -> weights, float [n] from 0 to 1, over the n rows of the dataset. `rows` is a
`RowTallies`: its columns `accuracy`, `spread` and `known` hold the results of each row's groups so far. A row without a
result has the weight 1, whatever the sampler returns for it.
"""

import numpy as np

from april.broker.ledger.row_tallies import RowTallies


def order(rows: RowTallies) -> np.ndarray:
    """Sampler: weight 1 for every row, [n], so each prompt comes once an epoch, in the epoch's seeded order, whatever
    the results."""
    return np.ones(len(rows.last))


vars(order)["in_order"] = True


def difficulty(rows: RowTallies) -> np.ndarray:
    """Sampler: weight 4 p (1 - p), [n], p a prompt's pass rate: prompts solved half of the time come first, those
    always or never solved last.

    This is the variance p (1 - p) of pass or fail, divided by its maximum 1/4: "Learning to Reason at the Frontier of
    Learnability", arXiv 2502.12272.
    """
    passed = rows.accuracy.clip(0, 1)
    return 4 * passed * (1 - passed)


def spread(rows: RowTallies) -> np.ndarray:
    """Sampler: the weight, [n], is the standard deviation of the rewards in a prompt's groups, divided by the largest
    of all prompts. Prompts whose samples are rewarded most differently come first, whatever the scale of rewards."""
    largest = rows.spread.max(initial=0.0)
    return rows.spread / largest if largest > 0 else np.ones(len(rows.spread))
