"""M2PO: the tokens that have moved most are masked, as many as a bound on the batch's second moment asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.corrections import StaleTokens, over_the_batch

if TYPE_CHECKING:
    from torch import Tensor


@over_the_batch
def m2po(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """0 for the tokens with the largest (log pi - log mu)^2, until the mean of the others is below the threshold.

    "Prosperity before Collapse", arXiv 2510.01161, its second moment and mask as AReaL's documentation and actor have
    them, over the tokens of the batch that have an advantage. Tokens that have moved equally far are treated alike.
    """
    moments, trained = tokens.whole.double().square(), tokens.advantages != 0
    largest = largest_kept(tokens.ranks.gathered(moments[trained]), section.m2po_threshold)
    return ((moments <= largest) | ~trained).to(tokens.whole.dtype)


def largest_kept(moments: Tensor, threshold: float) -> float:
    """The largest of the moments such that the mean of those up to it is below the threshold; below all without one."""
    values, counts = moments.unique(return_counts=True)
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    kept = values[means < threshold]
    return kept[-1].item() if len(kept) else -1.0
