"""M2PO: masks the tokens with the largest log-ratios until the batch's second moment is below a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.corrections import StaleTokens, over_the_batch

if TYPE_CHECKING:
    from torch import Tensor


@over_the_batch
def m2po(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """Mask, [K]: 0 for the tokens of the batch with the largest (log pi - log mu)^2, as many as needed until the mean
    over the kept tokens is below `m2po_threshold`; 1 elsewhere.

    "Prosperity before Collapse", arXiv 2510.01161, second moment and mask as in AReaL's documentation and actor, over
    the tokens with a nonzero advantage. Tokens with equal log-ratios are kept or masked together. Collective.
    """
    moments, trained = tokens.current_log_ratio.double().square(), tokens.advantages != 0
    largest = largest_kept_moment(tokens.ranks.gathered(moments[trained]), section.m2po_threshold)
    return ((moments <= largest) | ~trained).to(tokens.current_log_ratio.dtype)


def largest_kept_moment(moments: Tensor, threshold: float) -> float:
    """The largest moment m for which the mean of all moments <= m is below the threshold; -1 if there is none."""
    values, counts = moments.unique(return_counts=True)
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    kept = values[means < threshold]
    return kept[-1].item() if len(kept) else -1.0
