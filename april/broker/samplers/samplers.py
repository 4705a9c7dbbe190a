"""Samplers: how much each prompt of the dataset is worth another draw.

A sampler is a function (rows) -> weights, float [n] from 0 to 1, over the n rows of the dataset. `rows` has what their
groups so far have shown (`RowTallies`): columns `accuracy`, `spread`, `known`. It is not asked about rows without a
result, which have the weight 1.
"""

import numpy as np

from april.broker.ledger.row_tallies import RowTallies


def order(rows: RowTallies) -> np.ndarray:
    """Every prompt once an epoch, in the epoch's seeded order, whatever its groups show."""
    return np.ones(len(rows.last))


vars(order)["in_order"] = True


def difficulty(rows: RowTallies) -> np.ndarray:
    """4 p (1 - p), p a prompt's pass rate: those that are solved half of the time first, those always or never last.

    The variance of the success of an answer, over its largest: "Learning to Reason at the Frontier of Learnability",
    arXiv 2502.12272.
    """
    passed = rows.accuracy.clip(0, 1)
    return 4 * passed * (1 - passed)


def spread(rows: RowTallies) -> np.ndarray:
    """The standard deviation of a group's rewards, over the largest of all prompts: those first from whose rewards most
    was learnt, whatever their scale."""
    largest = rows.spread.max(initial=0.0)
    return rows.spread / largest if largest > 0 else np.ones(len(rows.spread))
