"""What top-k, top-p or min-p have left of the distribution that a token is drawn from: the ids that it could have been.

Behaviour log-probabilities of such tokens are renormalised over their supports, and the learner's are as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Support:
    """Of T tokens, ragged."""

    counts: np.ndarray
    """int32 [T]: ids of each token's support, 0 for a token that nobody drew"""
    ids: np.ndarray
    """int32 [sum of counts]: those ids, token by token"""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Support":
        """From each token's ids, int32; at least one token."""
        return cls(np.fromiter(map(len, rows), np.int32, len(rows)), np.concatenate(rows))

    @classmethod
    def none(cls, tokens: int) -> "Support":
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))

    def fits(self, tokens: int) -> bool:
        """Whether its parts fit together, and to so many tokens."""
        return len(self.counts) == tokens and not (self.counts < 0).any() and self.counts.sum() == len(self.ids)

    def holds(self, tokens: np.ndarray) -> bool:
        """Whether every token, int32 [T], has a support and is in it."""
        fits = self.fits(len(tokens)) and (self.counts > 0).all()
        return bool(fits and (self.places(tokens) < self.counts).all())

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """int64 [T]: each token's place in its support, which has at least one id; beyond it where it is not in it."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        found = self.ids == np.repeat(tokens, self.counts)
        at = np.where(found, np.arange(len(self.ids)), len(self.ids))
        return np.minimum.reduceat(at, starts) - starts
