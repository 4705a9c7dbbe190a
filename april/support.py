"""What top-k, top-p or min-p have left of the distribution that a token is drawn from: the ids that it could have been.

Behaviour log-probabilities of such tokens are renormalised over their supports, and the learner's are as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Support:
    """Of T tokens, ragged. A token that nobody drew, or that was drawn from everything, has none."""

    counts: np.ndarray
    """int32 [T]: ids of each token's support, 0 where it has none"""
    ids: np.ndarray
    """int32 [sum of counts]: those ids, token by token"""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Support":
        """From each token's ids, int32."""
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        return cls(counts, np.concatenate(rows) if len(rows) else np.zeros(0, np.int32))

    @classmethod
    def none(cls, tokens: int) -> "Support":
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))

    def fits(self, tokens: int) -> bool:
        """Whether its parts fit together, and to so many tokens."""
        return len(self.counts) == tokens and not (self.counts < 0).any() and self.counts.sum() == len(self.ids)

    def holds(self, tokens: np.ndarray) -> bool:
        """Whether every token, int32 [T], has a support and is in it."""
        if not self.fits(len(tokens)) or (self.counts < 1).any():
            return False
        found = self.ids == np.repeat(tokens, self.counts)
        return bool(np.logical_or.reduceat(found, np.cumsum(self.counts) - self.counts).all())
