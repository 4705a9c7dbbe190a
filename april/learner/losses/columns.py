"""Per-token columns: log-ratios that stay finite, and means over the sequences that tokens belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""log-ratios are cut here, so that exp() stays finite and a masked branch never yields 0 * inf in backward"""


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """log of p(token) / other(token), within ±MAX_LOG_RATIO; [K], [K] -> [K]."""
    return bounded(logprobs - others)


def bounded(log_ratios: Tensor) -> Tensor:
    """Within ±MAX_LOG_RATIO; [K] -> [K]."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def probability_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """p(token) / other(token); [K], [K] -> [K]."""
    return log_ratio(logprobs, others).exp()


@dataclass(frozen=True, eq=False)
class Spans:
    """Which sequence each token belongs to."""

    index: Tensor
    """int64 [K]: 0 to S - 1, not decreasing"""
    lengths: Tensor
    """float32 [S]: response tokens of each sequence, at least 1"""

    def sum(self, column: Tensor) -> Tensor:
        """Each token's sequence sum of `column`; [K] -> [K]."""
        return self.totals(column)[self.index]

    def mean(self, column: Tensor) -> Tensor:
        """Each token's sequence mean of `column`; [K] -> [K]."""
        return (self.totals(column) / self.lengths)[self.index]

    def totals(self, column: Tensor) -> Tensor:
        """The sum of `column` over each sequence; [K] -> [S]."""
        return self.lengths.new_zeros(self.lengths.shape).index_add(0, self.index, column)
