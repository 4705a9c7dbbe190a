"""Per-token columns: log-ratios that stay finite, and means over the sequences that tokens belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: they are clamped to ±20 nats, so that exp() stays finite and a masked token never yields 0 * inf
in the backward pass."""


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """log p(token) - log q(token), clamped to ±MAX_LOG_RATIO; `other_logprobs` are log q; [K], [K] -> [K]."""
    return bounded(logprobs - other_logprobs)


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios clamped to ±MAX_LOG_RATIO; any shape."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def probability_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """p(token) / q(token), within exp(±MAX_LOG_RATIO); `other_logprobs` are log q; [K], [K] -> [K]."""
    return log_ratio(logprobs, other_logprobs).exp()


@dataclass(frozen=True, eq=False)
class Spans:
    """Mapping from the K tokens of a micro-batch to its S sequences."""

    index: Tensor
    """int64 [K]: number of each token's sequence, 0 to S - 1, in non-decreasing order."""
    lengths: Tensor
    """Number of response tokens of each sequence, at least 1; float32 [S]."""

    def sum(self, column: Tensor) -> Tensor:
        """For each token the sum of `column` over the token's sequence; [K] -> [K]."""
        return self.totals(column)[self.index]

    def mean(self, column: Tensor) -> Tensor:
        """For each token the mean of `column` over the token's sequence; [K] -> [K]."""
        return (self.totals(column) / self.lengths)[self.index]

    def discounted(self, column: Tensor, discount: float) -> Tensor:
        """For each token the sum of `column` over it and the later tokens of its sequence, each times `discount` to the
        power of its distance; [K] -> [K]. Computed in float64."""
        if discount == 0 or not len(column):
            return column
        rows, width = len(self.lengths), int(self.lengths.max())
        first = self.lengths.long().cumsum(0) - self.lengths.long()
        positions = self.index, self.index.new_ones(len(column)).cumsum(0) - 1 - first[self.index]
        padded = column.new_zeros(rows, width + 1).double()
        padded.index_put_(positions, column.double())
        for t in reversed(range(width)):
            padded[:, t] += discount * padded[:, t + 1]
        return padded[positions].to(column.dtype)

    def totals(self, column: Tensor) -> Tensor:
        """For each sequence the sum of `column` over the sequence; [K] -> [S]."""
        return column.new_zeros(self.lengths.shape).index_add(0, self.index, column)
