"""Sampling supports: the token ids among which truncated sampling (top-k, top-p, min-p) drew each response token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Support:
    """Supports of T tokens, the token ids that each was drawn from, as a ragged array."""

    counts: np.ndarray
    """Size of each token's support, int32 [T]; 0 for a token that was not sampled."""
    ids: np.ndarray
    """The ids of all supports, concatenated: int32 [sum of counts]."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Support":
        """The supports of one or more tokens. `rows`: for each token the ids that it was drawn from, int32."""
        return cls(np.fromiter(map(len, rows), np.int32, len(rows)), np.concatenate(rows))

    @classmethod
    def none(cls, tokens: int) -> "Support":
        """Empty supports of `tokens` tokens."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))

    def fits(self, tokens: int) -> bool:
        """Whether counts and ids are consistent, and there are `tokens` counts."""
        return len(self.counts) == tokens and not (self.counts < 0).any() and self.counts.sum() == len(self.ids)

    def holds(self, tokens: np.ndarray) -> bool:
        """Whether every token, int32 [T], is in its support."""
        fits = self.fits(len(tokens)) and (self.counts > 0).all()
        return bool(fits and (self.indices_of(tokens) < self.counts).all())

    def indices_of(self, tokens: np.ndarray) -> np.ndarray:
        """Index of each token in its support, int64 [T]; at least the support's size if absent. No support may be
        empty."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        found = self.ids == np.repeat(tokens, self.counts)
        at = np.where(found, np.arange(len(self.ids)), len(self.ids))
        return np.minimum.reduceat(at, starts) - starts
